"""Data, optimizer, checkpoints, metrics and the training loop."""
