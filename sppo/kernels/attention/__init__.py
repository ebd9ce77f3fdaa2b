"""Attention of one subsequence over its whole prefix: one interface, several back ends."""
