"""Providers of the weights and gradients of stages: resident, sharded over ranks, or streamed."""
