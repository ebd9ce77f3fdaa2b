"""Microbenchmarks of a machine: kernels, copies and messages."""
