"""Aliases of collectives that newer versions of torch have renamed."""

from __future__ import annotations

import torch.distributed as dist

# torch 2.13 deprecates the old names, and torch 2.11 has no others.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
