"""Costs of a run: FLOPs, seconds, and bytes of memory. Pure Python and numpy, never torch."""
