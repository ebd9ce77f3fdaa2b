"""Small tables that the host makes and kernels on a device read."""

from __future__ import annotations

import torch
from torch import Tensor


def on_device(table: Tensor, device: torch.device) -> Tensor:
    """Copy a table of the host to ``device`` without waiting for it.

    The copy is made in the current stream: whoever keeps it for other calls keeps it for those of
    this stream alone (:func:`stream_number`).
    """
    if device.type == "cuda":  # or the host would wait until the device has it
        table = table.pin_memory()
    return table.to(device, non_blocking=True)


def stream_number(device: torch.device) -> int:
    """Number of the current stream of ``device``; 0 where there are none."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
