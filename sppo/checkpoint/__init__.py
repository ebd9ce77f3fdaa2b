"""Checkpoints: saved atomically, verified before use, read by any number of ranks."""
