"""Reports of a run: metrics of every step, progress, and the summary at its end."""
