"""Decisions made before a run: cost, memory, partition. Pure Python and numpy, never torch."""
