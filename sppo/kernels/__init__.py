"""Kernels: attention, element-wise operations, cross entropy, each behind one interface."""
