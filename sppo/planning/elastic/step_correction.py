"""Correction of step predictions by measured times of earlier steps.

Every step yields the ratio of measured to predicted seconds of forwards and of backwards; the
factor by which the program took longer than these explain; and the seconds outside of the program.
A correction takes medians over the last steps, so a single disturbed step changes little. All
figures are sums over all ranks, so every rank computes the same correction.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from sppo.cost.workload import CostCorrection

MOST_FACTOR = 8.0
"""Largest factor of a correction; the smallest is its inverse. Presets are not further off, but
broken clocks may be."""
_STEPS = 7
"""Number of last steps that a correction rests on; up to three of them may be disturbed."""

ActionSums = tuple[float, float]
"""Measured seconds of the forwards, or of the backwards, of a step, and uncorrected predictions."""


@dataclass(frozen=True, slots=True)
class StepCorrection:
    """Measured against predicted time of one step, or medians of several steps.

    Attributes:
        forward: Ratio of measured to predicted seconds of forwards.
        backward: The same ratio of backwards, including recomputation.
        waiting: Ratio of measured to predicted time from the first action of the program to the
            last, divided by the same ratio of compute: gaps between actions, messages, and waits
            for actions slower than others of their kind.
        rest_s: Seconds outside of the program, without waiting for a plan. Not a multiple of the
            predicted update, since reading data and gathering figures also count.
        steps: Number of measured steps.
    """

    forward: FiniteFloat
    backward: FiniteFloat
    waiting: FiniteFloat
    rest_s: FiniteFloat
    steps: int = 1

    @property
    def compute(self) -> CostCorrection:
        """Correction of forwards and backwards, with which plans may also be made."""
        return CostCorrection(self.forward, self.backward)


History = tuple[StepCorrection, ...]
"""Figures of the last steps, oldest first. At most one step more than a correction rests on, since
a plan that is begun while a step runs cannot use the time of that step."""
_HISTORY = TypeAdapter(Annotated[History, Field(max_length=_STEPS + 1)])


def measured_step(
    forward: ActionSums, backward: ActionSums, *, actions: float, rest_s: float
) -> StepCorrection:
    """Return the figures of a step.

    Args:
        forward: Sums over the forwards of all ranks.
        backward: Sums over the backwards of all ranks.
        actions: Measured over predicted time from the first action to the last.
        rest_s: Seconds outside of the program, mean over ranks.
    """
    both = _ratio(forward[0] + backward[0], forward[1] + backward[1])
    waiting = _bounded(actions / both if both > 0 else 1.0)
    return StepCorrection(_ratio(*forward), _ratio(*backward), waiting, max(0.0, rest_s))


def extended(history: History, figures: StepCorrection) -> History:
    """Return a history with the figures of one more step."""
    return (*history, figures)[-_STEPS - 1 :]


def correction_by(history: History) -> StepCorrection | None:
    """Return the correction by the last steps; None if there are none."""
    steps = history[-_STEPS:]
    if not steps:
        return None
    forward, backward, waiting, rest_s = (
        statistics.median(getattr(one, name) for one in steps)
        for name in ("forward", "backward", "waiting", "rest_s")
    )
    forward, backward, waiting = map(_bounded, (forward, backward, waiting))
    return StepCorrection(forward, backward, waiting, rest_s, steps=len(steps))


def history_json(history: History) -> Any:
    """Return plain values, from which :func:`history_from_json` restores a history bit by bit."""
    return _HISTORY.dump_python(history, mode="json", exclude={"__all__": {"steps"}})


def history_from_json(values: Any) -> History:
    """Return the history from the plain values of :func:`history_json`.

    Raises:
        ValueError: The values are not those of a history.
    """
    try:
        return _HISTORY.validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        raise ValueError(f"no history of corrections: {error.errors()[0]['msg']}") from None


def _ratio(measured_s: float, predicted_s: float) -> float:
    """Return measured over predicted seconds; 1 if nothing is predicted."""
    return measured_s / predicted_s if predicted_s > 0 else 1.0


def _bounded(factor: float) -> float:
    """Return `factor` limited to between 1 / `MOST_FACTOR` and `MOST_FACTOR`."""
    return min(max(factor, 1 / MOST_FACTOR), MOST_FACTOR)
