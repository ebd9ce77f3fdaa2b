"""Checkpoints: saved atomically, verified before use, readable by any number of ranks."""
