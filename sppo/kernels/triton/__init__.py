"""Triton kernels; imported only where a kernel is launched, so that triton stays optional."""
