"""Decision whether a chain of element-wise operations runs as one Triton kernel."""

from __future__ import annotations

import logging
from functools import lru_cache

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


def fused(x: Tensor) -> bool:
    """Return whether Triton kernels serve ``x``: on a GPU where triton works, not elsewhere."""
    return x.device.type == "cuda" and _triton_works(x.device)


def fused_in_place(*operands: Tensor | None) -> bool:
    """:func:`fused` for a kernel that writes over its operands, and so cannot copy them first."""
    there = [x for x in operands if x is not None]
    return fused(there[0]) and all(x.is_contiguous() for x in there)


@lru_cache(maxsize=16)
def _triton_works(device: torch.device) -> bool:
    """A first, tiny launch: triton may be missing, or the compiler that it needs."""
    try:
        from sppo.kernels.triton.activations import activation

        activation(None, torch.ones(1, device=device), kind="gelu")
    except Exception as error:  # whatever it raises, torch can do the work
        first_line = (str(error).splitlines() or [""])[0]
        _log.warning(
            "norms and activations run as chains of torch operations, because triton does not: "
            "%s: %s",
            type(error).__name__,
            first_line,
        )
        return False
    return True
