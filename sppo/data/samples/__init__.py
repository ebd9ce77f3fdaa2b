"""Samples (documents that are trained on whole), their lengths, and the samples of each step."""
