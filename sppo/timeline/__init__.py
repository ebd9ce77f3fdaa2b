"""Views of timelines: PNG plot, HTML page, Chrome trace, and a table of numbers."""
