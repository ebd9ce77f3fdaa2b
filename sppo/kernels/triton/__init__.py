"""Kernels in Triton; imported where one is launched, so that torch alone is enough elsewhere."""
