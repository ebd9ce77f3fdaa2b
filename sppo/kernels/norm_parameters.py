"""Parameters of a norm, for its plain and its fused kernels.

Legend: E columns of the rows that are normed.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class NormParameters(NamedTuple):
    """Parameters of a norm: of LayerNorm, which has a bias, or of RMSNorm.

    RMSNorm is ``x / rms(x) * weight``, LayerNorm ``(x - mean) / std * weight + bias``. With
    ``offset``, RMSNorm is ``x / rms(x) * (1 + weight)`` in fp32, rounded once.
    """

    weight_E: Tensor
    bias_E: Tensor | None
    eps: float
    offset: bool = False
