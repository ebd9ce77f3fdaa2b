"""Costs of linear attention: of its rule, of its element-wise kernels, and of its states."""
