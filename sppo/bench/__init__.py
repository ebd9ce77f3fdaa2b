"""Microbenchmarks that measure a machine."""
