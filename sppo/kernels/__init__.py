"""Kernels: attention, element-wise operations, cross entropy, each with one interface."""
