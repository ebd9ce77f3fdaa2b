"""Kernels: attention, elementwise operations, cross entropy, each behind one interface."""
