"""Plots as PNG files: loss, loss by position, needles found, a step, timelines."""
