"""Steps of a run: the work of each, planned ahead, run, measured and judged."""
