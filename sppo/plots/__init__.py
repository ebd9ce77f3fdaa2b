"""Plots as PNG files: loss, lengths of documents, loss by position, a step, timelines."""
