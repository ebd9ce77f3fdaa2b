"""Evaluation of a run's weights without training, and scores of documents."""
