"""Views of timelines: Chrome trace, numbers for JSON and tables, and the style of plots."""
