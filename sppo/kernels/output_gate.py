"""Gate of the output of attention, forward and backward.

Legend: C tokens, Q query width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gated(o_CQ: Tensor, gate_CQ: Tensor) -> Tensor:
    """Return ``o * sigmoid(gate)``."""
    return gate_CQ.sigmoid().mul_(o_CQ)


def gated_backward_(dy_CQ: Tensor, o_CQ: Tensor, gate_CQ: Tensor) -> None:
    """Turn the gradient of :func:`gated` into that of o, and the gate into its gradient."""
    sigmoid_CQ = gate_CQ.sigmoid()
    gate_CQ.copy_(torch.ops.aten.sigmoid_backward(dy_CQ * o_CQ, sigmoid_CQ))
    dy_CQ.mul_(sigmoid_CQ)
