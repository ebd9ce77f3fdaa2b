"""Costs of the stages of a pipeline: bytes, FLOPs, seconds, copies and messages."""
