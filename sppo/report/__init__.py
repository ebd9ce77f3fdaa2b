"""Reports of a run: metrics of every step, progress, plots, and the summary at its end."""
