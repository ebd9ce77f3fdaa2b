"""Runs one rank's program over subsequences: KV store, stage, executor."""
