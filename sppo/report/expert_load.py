"""Load of experts in a step: how many tokens chose each, summed up in two figures per layer.

Legend: L layers, X experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Loads = NDArray[np.float64]
"""Number of tokens that chose each expert, [L, X]; 0 in layers without experts or backward."""


@dataclass(frozen=True, slots=True)
class ExpertMetrics:
    """Load of the experts in one step, of all replicas, by layer that has experts."""

    largest: list[float]
    """Load of the most chosen expert over the mean load of its layer: from 1 to X / k."""
    entropy: list[float]
    """Entropy of the loads over that of equal loads: 1 if they are equal, 0 if one expert has
    all."""


def expert_metrics(loads: Loads) -> ExpertMetrics | None:
    """Return the figures of the layers that counted loads; None if none did."""
    counted = loads[loads.sum(1) > 0]
    if not len(counted):
        return None
    shares = counted / counted.sum(1, keepdims=True)
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    most = np.log(max(2, shares.shape[1]))
    entropy = -(shares * logs).sum(1) / most if shares.shape[1] > 1 else np.ones(len(shares))
    return ExpertMetrics((shares.max(1) * shares.shape[1]).tolist(), entropy.tolist())
