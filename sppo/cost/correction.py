"""Correction of predicted compute seconds by times measured in a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostCorrection:
    """Factors of the predicted compute seconds of forwards and backwards.

    Forwards and backwards have separate corrections: their kernels and memory traffic differ, and a
    run times both on any device, action by action. Kernels inside an action cannot be timed without
    slowing the action down, so they are not corrected one by one.

    Attributes:
        forward: Factor of forwards, including the head.
        backward: Factor of both halves of backwards and of recomputation.
    """

    forward: float = 1.0
    backward: float = 1.0

    def __post_init__(self) -> None:
        if not (self.forward > 0 and self.backward > 0):
            raise ValueError(
                f"correction of forwards by {self.forward} and of backwards by {self.backward}: "
                "both must be above 0"
            )


UNCORRECTED = CostCorrection()
