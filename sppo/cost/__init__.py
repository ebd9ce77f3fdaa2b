"""Cost model of a run: FLOPs, seconds, and bytes of memory, in Python and numpy without torch."""
