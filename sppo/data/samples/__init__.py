"""Samples: documents that are trained on whole, the steps they come in, and their lengths."""
