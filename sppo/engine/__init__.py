"""Execution of one rank's program over subsequences: engine, executor, stages, KV store."""
