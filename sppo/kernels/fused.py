"""Decision between one fused Triton kernel and a chain of torch operations."""

from __future__ import annotations

import logging
from functools import lru_cache

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


def fused(x: Tensor) -> bool:
    """Return whether ``x`` is processed by Triton kernels: on a GPU for which triton works."""
    return x.device.type == "cuda" and _triton_works(x.device)


def fused_in_place(*operands: Tensor | None) -> bool:
    """Return whether a Triton kernel can overwrite ``operands``: :func:`fused` and contiguous.

    Operands that are None are ignored.
    """
    there = [x for x in operands if x is not None]
    return fused(there[0]) and all(x.is_contiguous() for x in there)


@lru_cache(maxsize=16)
def _triton_works(device: torch.device) -> bool:
    """Return whether a tiny launch succeeds: triton may be missing, or its compiler."""
    try:
        from sppo.kernels.triton.activations import activation

        activation(None, torch.ones(1, device=device), kind="gelu")
    except Exception as error:  # torch is the fallback for any failure of triton
        first_line = (str(error).splitlines() or [""])[0]
        _log.warning(
            "norms and activations run as chains of torch operations, because triton does not: "
            "%s: %s",
            type(error).__name__,
            first_line,
        )
        return False
    return True
