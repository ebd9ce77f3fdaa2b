"""Layers with explicit forward and backward, initial weights, and Hugging Face weight files."""
