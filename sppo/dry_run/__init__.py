"""Training steps on a GPU that is not there: the real engine on tensors without data."""
