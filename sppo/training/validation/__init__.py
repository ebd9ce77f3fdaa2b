"""Evaluation of sets of sequences: while a run trains, and by itself."""
