"""Correction of predicted compute seconds, as a run has measured them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostCorrection:
    """Factor of the predicted seconds of compute, and seconds that are added.

    One of each for forwards and for backwards, whose kernels and memory traffic differ: these two a
    run times apart on any device, action by action. Rates that are off multiply all seconds; what
    it takes to launch the kernels of a layer adds some, however many tokens there are. What takes
    the time inside an action, products or attention, no clock tells without slowing it down.

    Attributes:
        forward: Factor of forwards, the head included.
        backward: Factor of both halves of backwards and of what they recompute.
        forward_launch_s: Seconds more of the forward of one subsequence in one layer.
        backward_launch_s: Seconds more of its backward.
    """

    forward: float = 1.0
    backward: float = 1.0
    forward_launch_s: float = 0.0
    backward_launch_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.forward > 0 and self.backward > 0):
            raise ValueError(
                f"correction of forwards by {self.forward} and of backwards by {self.backward}: "
                "both must be above 0"
            )
        if not (self.forward_launch_s >= 0 and self.backward_launch_s >= 0):
            raise ValueError(
                f"correction of forwards by {self.forward_launch_s} s and of backwards by "
                f"{self.backward_launch_s} s for each layer: both must be at least 0"
            )


UNCORRECTED = CostCorrection()
