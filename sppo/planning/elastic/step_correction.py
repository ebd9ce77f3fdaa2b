"""Correction of step predictions by measured times of earlier steps.

Every step yields the ratio of measured to predicted seconds of forwards and of backwards; the
factor by which the program took longer than these explain; and the seconds outside of the program.
A correction takes medians over the last steps, so a single disturbed step changes little. All
figures are sums over all ranks, so every rank computes the same correction.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from sppo.cost.layer import CostCorrection

MOST_FACTOR = 8.0
"""Largest factor of a correction; the smallest is its inverse. Presets are not further off, but
broken clocks may be."""
_STEPS = 7
"""Number of last steps that a correction rests on; up to three of them may be disturbed."""


ActionSums = tuple[float, float]
"""Measured seconds of the forwards, or of the backwards, of a step, and uncorrected predictions."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Measured against predicted time of one step.

    Attributes:
        forward: Ratio of measured to predicted seconds of forwards.
        backward: The same ratio of backwards, including recomputation.
        waiting: Ratio of measured to predicted time from the first action of the program to the
            last, divided by the same ratio of compute.
        rest_s: Seconds outside of the program, without waiting for a plan.
        actions: Ratio of measured to predicted time from the first action to the last.
    """

    forward: FiniteFloat
    backward: FiniteFloat
    waiting: FiniteFloat
    rest_s: FiniteFloat
    actions: FiniteFloat

    @classmethod
    def of(
        cls, forward: ActionSums, backward: ActionSums, *, actions: float, rest_s: float
    ) -> Self:
        """Return the figures of a step.

        Args:
            forward: Sums over the forwards of all ranks.
            backward: Sums over the backwards of all ranks.
            actions: Measured over predicted time from the first action to the last.
            rest_s: Seconds outside of the program, mean over ranks.
        """
        both = _ratio(forward[0] + backward[0], forward[1] + backward[1])
        waiting = bounded(actions / both if both > 0 else 1.0)
        return cls(_ratio(*forward), _ratio(*backward), waiting, max(0.0, rest_s), actions)


_FIGURES = TypeAdapter(Annotated[tuple[StepFigures, ...], Field(max_length=_STEPS + 1)])


@dataclass(frozen=True, slots=True)
class StepCorrection:
    """Correction of step predictions.

    Attributes:
        steps: Number of measured steps that the correction rests on; 0 corrects nothing.
        compute: Correction of forwards and backwards, with which plans may also be made.
        waiting: Factor of the time from the first action to the last that compute does not explain:
            gaps between actions, messages, and waits for actions slower than others of their kind.
        rest_s: Seconds outside of the program; None for the update time of the cost model. Not a
            multiple of the update time, since reading data and gathering figures also count.
    """

    steps: int = 0
    compute: CostCorrection = CostCorrection()
    waiting: float = 1.0
    rest_s: float | None = None


NO_CORRECTION = StepCorrection()


@dataclass(frozen=True, slots=True)
class CorrectionHistory:
    """Figures of the last steps, from which corrections are computed.

    Attributes:
        figures: Figures per step, oldest first. At most one step more than a correction rests on,
            since a plan that is begun while a step runs cannot use the time of that step.
    """

    figures: tuple[StepFigures, ...] = ()

    def after(self, figures: StepFigures) -> CorrectionHistory:
        """Return the history extended by the figures of one more step."""
        return CorrectionHistory((*self.figures, figures)[-_STEPS - 1 :])

    @property
    def current(self) -> StepCorrection:
        """Correction by the last steps."""
        return _correction(self.figures[-_STEPS:])

    @property
    def previous(self) -> StepCorrection:
        """Correction without the last step, as known when the plan of the next step was begun."""
        return _correction(self.figures[:-1])

    def as_json(self) -> Any:
        """Return plain values, from which :meth:`from_json` restores the history bit by bit."""
        return _FIGURES.dump_python(self.figures, mode="json")

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Return the history from the plain values of :meth:`as_json`.

        Raises:
            ValueError: The values are not those of a history.
        """
        try:
            return cls(_FIGURES.validate_json(json.dumps(values), strict=True))
        except ValidationError as error:
            raise ValueError(f"no history of corrections: {error.errors()[0]['msg']}") from None


def _correction(figures: Sequence[StepFigures]) -> StepCorrection:
    if not figures or not _helps(figures):
        return NO_CORRECTION
    forward, backward = (
        bounded(statistics.median(getattr(one, name) for one in figures))
        for name in ("forward", "backward")
    )
    return StepCorrection(
        steps=len(figures),
        compute=CostCorrection(forward, backward),
        waiting=bounded(statistics.median(one.waiting for one in figures)),
        rest_s=statistics.median(one.rest_s for one in figures),
    )


def _helps(figures: Sequence[StepFigures]) -> bool:
    """Return whether these steps were nearer to the steps before them than to the prediction.

    On a machine that other programs disturb, a step says little about the next one. Errors are
    medians, relative to the measured time, of predictions known when a step's plan was begun.
    """
    ratios = [one.actions for one in figures]
    known = [
        (statistics.median(ratios[: place - 1]), ratios[place]) for place in range(2, len(ratios))
    ]
    if not known:
        return True
    corrected = statistics.median(abs(before / ratio - 1) for before, ratio in known)
    return corrected <= statistics.median(abs(1 / ratio - 1) for _, ratio in known)


def _ratio(measured_s: float, predicted_s: float) -> float:
    """Return measured over predicted seconds; 1 if nothing is predicted."""
    return measured_s / predicted_s if predicted_s > 0 else 1.0


def bounded(factor: float) -> float:
    """Return `factor` limited to between 1 / `MOST_FACTOR` and `MOST_FACTOR`."""
    return min(max(factor, 1 / MOST_FACTOR), MOST_FACTOR)
