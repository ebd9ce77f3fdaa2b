"""What a run reports: metrics of every step, progress, plots, and the summary at its end."""
