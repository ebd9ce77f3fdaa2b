"""Views of timelines: Chrome trace, a table of numbers, and the style of plots."""
