"""Dry runs: training steps of the real engine on a fake GPU with torch's fake tensors."""
