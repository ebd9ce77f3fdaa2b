"""What a run costs: FLOPs, seconds, and bytes of memory. Pure Python and numpy, never torch."""
