"""Correction of step predictions by measured times of earlier steps.

Every step yields the ratio of measured to predicted seconds of forwards and of backwards; the
factor by which the program took longer than these explain; and the seconds outside of the program.
A correction takes medians over the last steps, so a single disturbed step changes little. All
figures are sums over all ranks, so every rank computes the same correction.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, Self

import numpy as np

from sppo.cost.correction import CostCorrection
from sppo.hardware.rates import Floats

MOST_FACTOR = 8.0
"""Largest factor of a correction; the smallest is its inverse. Presets are not further off, but
broken clocks may be."""
MOST_LAUNCHES = 0.5
"""Largest share of the measured seconds that is attributed to kernel launches."""
_STEPS = 7
"""Number of last steps that a correction rests on; up to three of them may be disturbed."""
_OUTLIER = 3.0
"""Factor by which an action's ratio of measured to predicted seconds may differ from the median
ratio of its rank; larger differences are clipped to this factor."""
_LEAST_SPREAD = 0.004
"""Least variation of predicted seconds per layer that separates rates from launches: if all actions
are alike, any share of the seconds may be launches. It is sin² of the angle between the seconds
and the layers of all actions; about the square of their relative standard deviation."""


@dataclass(frozen=True, slots=True)
class ActionSums:
    """Sums over the forwards, or the backwards, of a step, from which a correction is computed.

    Attributes:
        measured_s: Sum of measured seconds.
        predicted_s: Sum of predicted seconds, uncorrected.
        layers: Sum of numbers of layers.
        predicted_predicted: Sum of squares of predicted seconds.
        predicted_layers: Sum of products of predicted seconds and layers.
        layers_layers: Sum of squares of layers.
        predicted_measured: Sum of products of predicted and measured seconds, outliers clipped.
        layers_measured: Sum of products of layers and measured seconds, outliers clipped.
    """

    measured_s: float
    predicted_s: float
    layers: float
    predicted_predicted: float
    predicted_layers: float
    layers_layers: float
    predicted_measured: float
    layers_measured: float

    @classmethod
    def of(cls, measured_s: Floats, predicted_s: Floats, layers: Floats) -> Self:
        """Return the sums over the actions of one rank, given as arrays [actions]."""
        cut = measured_s
        if len(measured_s):
            usual = predicted_s * np.median(measured_s / predicted_s)
            cut = np.clip(measured_s, usual / _OUTLIER, usual * _OUTLIER)
        sums = (
            measured_s.sum(),
            predicted_s.sum(),
            layers.sum(),
            *(predicted_s @ other for other in (predicted_s, layers)),
            layers @ layers,
            *(one @ cut for one in (predicted_s, layers)),
        )
        return cls(*map(float, sums))

    @property
    def launch_s(self) -> float | None:
        """Seconds of kernel launches per layer, by least squares; None if actions are too alike.

        Fit of ``measured = factor * predicted + launch_s * layers``; at least 0, and at most
        `MOST_LAUNCHES` of the measured seconds.
        """
        pp, pl, ll = self.predicted_predicted, self.predicted_layers, self.layers_layers
        determinant = pp * ll - pl * pl
        if determinant <= _LEAST_SPREAD * pp * ll:
            return None
        found = (pp * self.layers_measured - pl * self.predicted_measured) / determinant
        return min(max(found, 0.0), MOST_LAUNCHES * self.measured_s / self.layers)


@dataclass(frozen=True, slots=True)
class PassFigures:
    """Measured against predicted time of the forwards, or of the backwards, of one step.

    Attributes:
        ratio: Measured over predicted seconds.
        layers_per_s: Layers of all actions per predicted second.
        launch_s: Seconds of kernel launches per layer; negative if they cannot be determined.
    """

    ratio: float
    layers_per_s: float
    launch_s: float

    @classmethod
    def of(cls, sums: ActionSums) -> Self:
        """Return the figures from sums over the actions of all ranks."""
        if sums.predicted_s <= 0:
            return cls(1.0, 0.0, -1.0)
        launch_s = sums.launch_s
        return cls(
            sums.measured_s / sums.predicted_s,
            sums.layers / sums.predicted_s,
            -1.0 if launch_s is None else launch_s,
        )


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Measured against predicted time of one step.

    Attributes:
        forward: Figures of forwards.
        backward: Figures of backwards, including recomputation.
        waiting: Ratio of measured to predicted time from the first action of the program to the
            last, divided by the same ratio of compute.
        rest_s: Seconds outside of the program, without waiting for a plan.
        actions: Ratio of measured to predicted time from the first action to the last.
    """

    forward: PassFigures
    backward: PassFigures
    waiting: float
    rest_s: float
    actions: float

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
        predicted_s = forward.predicted_s + backward.predicted_s
        compute = (forward.measured_s + backward.measured_s) / predicted_s if predicted_s else 1.0
        waiting = actions / compute if compute > 0 else 1.0
        return cls(
            PassFigures.of(forward),
            PassFigures.of(backward),
            bounded(waiting),
            max(0.0, rest_s),
            actions,
        )


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

    def as_json(self) -> list[list[float]]:
        """Return plain values, from which :meth:`from_json` restores the history bit by bit."""
        return [
            [*astuple(one.forward), *astuple(one.backward), one.waiting, one.rest_s, one.actions]
            for one in self.figures
        ]

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Return the history from the plain values of :meth:`as_json`.

        Raises:
            ValueError: The values are not those of a history.
        """
        each = len(fields(PassFigures))
        if not isinstance(values, list) or len(values) > _STEPS + 1:
            raise ValueError(f"a history of corrections is a list of at most {_STEPS + 1} steps")
        figures = []
        for row in values:
            if not _is_step(row, 2 * each + 3):
                raise ValueError(f"a step of a history of corrections is {row!r}")
            forward, backward = PassFigures(*row[:each]), PassFigures(*row[each : 2 * each])
            figures.append(StepFigures(forward, backward, *row[2 * each :]))
        return cls(tuple(figures))


def _is_step(row: Any, count: int) -> bool:
    """Return whether `row` is a list of `count` finite floats."""
    return (
        isinstance(row, list)
        and len(row) == count
        and all(isinstance(value, float) and np.isfinite(value) for value in row)
    )


def _correction(figures: Sequence[StepFigures]) -> StepCorrection:
    if not figures or not _helps(figures):
        return NO_CORRECTION
    forward, forward_launch_s = _of_pass([one.forward for one in figures])
    backward, backward_launch_s = _of_pass([one.backward for one in figures])
    return StepCorrection(
        steps=len(figures),
        compute=CostCorrection(forward, backward, forward_launch_s, backward_launch_s),
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


def _of_pass(figures: Sequence[PassFigures]) -> tuple[float, float]:
    """Return the factor, and the seconds of launches per layer, by medians over steps.

    The factor applies to the seconds without launches, so that both together match the median step.
    """
    known = [one.launch_s for one in figures if one.launch_s >= 0]
    launch_s = statistics.median(known) if known else 0.0
    factor = statistics.median(one.ratio - launch_s * one.layers_per_s for one in figures)
    return bounded(factor), launch_s


def bounded(factor: float) -> float:
    """Return `factor` limited to between 1 / `MOST_FACTOR` and `MOST_FACTOR`."""
    return min(max(factor, 1 / MOST_FACTOR), MOST_FACTOR)
