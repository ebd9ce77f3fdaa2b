"""Views of timelines: PNG plot, Chrome trace, and a table of numbers."""
