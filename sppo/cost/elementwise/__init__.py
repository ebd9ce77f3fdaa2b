"""Element-wise kernels of a layer: of the residual stream, attention, linear attention, MLP."""
