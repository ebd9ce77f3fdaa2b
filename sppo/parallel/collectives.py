"""Collectives that newer versions of torch have renamed, under one name each."""

from __future__ import annotations

import torch.distributed as dist

# torch 2.13 warns at the old names, torch 2.11 has only those.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
