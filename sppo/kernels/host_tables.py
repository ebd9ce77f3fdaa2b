"""Copies to the device of small tables that the host computes and kernels read."""

from __future__ import annotations

import torch
from torch import Tensor


def on_device(table: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a host table on ``device`` without waiting for the copy.

    The copy is made in the current stream: a cached copy may be read in the same stream only
    (:func:`stream_number`).
    """
    if device.type == "cuda":  # a copy from pageable memory would block the host
        table = table.pin_memory()
    return table.to(device, non_blocking=True)


def stream_number(device: torch.device) -> int:
    """Return the handle of the current CUDA stream of ``device``; 0 on other devices."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
