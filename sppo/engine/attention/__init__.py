"""Attention of the running subsequence: the K/V store, and attention that reads its prefix."""
