"""Loss and gradients that one computation of a step gave, before its update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sppo.engine.engine import StepResult


@dataclass(frozen=True, slots=True)
class StepSums:
    """Loss and gradients of a step, reduced over all ranks, from which its update is decided."""

    num_valid: int
    """Number of valid labels of all replicas."""
    loss: float
    """Mean loss over these labels; NaN if there is none."""
    norm: float
    """Euclidean norm of the gradients of all ranks."""
    gradients: Mapping[str, Tensor]
    """Gradients of what this rank updates, by global name."""


@dataclass(frozen=True, slots=True)
class Computed:
    """One computation of a step."""

    result: StepResult
    sums: StepSums
    norm: Tensor
    """Norm of the sums as a tensor, 0-d."""
    actions_s: float
    """Seconds of the program's actions."""
