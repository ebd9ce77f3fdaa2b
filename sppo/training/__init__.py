"""The training loop, its devices, its checks before the start, and evaluation."""
