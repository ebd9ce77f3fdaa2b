"""Correcting the prediction of the next steps by what earlier steps took.

Every step says of forwards and of backwards how their measured seconds lie over the predicted ones,
action by action; how much longer the program took than they explain; and the seconds outside of it.
A correction is made of medians over the last steps, so one step that something else disturbed
changes little. All figures are sums over all ranks, so every rank corrects alike.
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
"""Factors are between its inverse and this: a preset is not further off, a broken clock may be."""
MOST_LAUNCHES = 0.5
"""Share of the measured seconds that launches take at most."""
_STEPS = 7
"""Steps that a correction rests on: up to three of them may be disturbed."""
_OUTLIER = 3.0
"""Times the median of measured over predicted from which on an action counts as so many."""
_LEAST_SPREAD = 0.004
"""How different predictions of the actions of a step must be to tell rates from launches: where all
are alike, any share of the seconds may be launches'. It is sin² of the angle between the seconds
and the layers of all actions; about the square of their relative standard deviation."""


@dataclass(frozen=True, slots=True)
class ActionSums:
    """Sums over the forwards, or the backwards, of a step: all that their correction needs.

    Attributes:
        measured_s: Their seconds.
        predicted_s: The same, uncorrected.
        layers: Layers that each is about.
        predicted_predicted: Sum of squares of predicted seconds.
        predicted_layers: Sum of products with layers.
        layers_layers: Sum of squares of layers.
        predicted_measured: Sum of products with measured seconds, outliers cut.
        layers_measured: The same of layers.
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
        """Return the sums over actions of one rank, [actions] each."""
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
        """Seconds of launches for one layer, by least squares; None where nothing tells them.

        ``measured = factor * predicted + launch_s * layers``, neither below 0.
        """
        pp, pl, ll = self.predicted_predicted, self.predicted_layers, self.layers_layers
        determinant = pp * ll - pl * pl
        if determinant <= _LEAST_SPREAD * pp * ll:
            return None
        found = (pp * self.layers_measured - pl * self.predicted_measured) / determinant
        return min(max(found, 0.0), MOST_LAUNCHES * self.measured_s / self.layers)


@dataclass(frozen=True, slots=True)
class PassFigures:
    """Figures of one step on forwards, or on backwards.

    Attributes:
        ratio: Measured over predicted seconds.
        layers_per_s: Layers of all actions, for each predicted second.
        launch_s: Seconds of launches for one layer; below 0 where nothing tells them.
    """

    ratio: float
    layers_per_s: float
    launch_s: float

    @classmethod
    def of(cls, sums: ActionSums) -> Self:
        """Return the figures of the actions of all ranks."""
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
    """Figures of one step on its predictions.

    Attributes:
        forward: Of forwards.
        backward: Of backwards, with what they recompute.
        waiting: Measured over predicted time from the first action of the program to the last, over
            the same of compute.
        rest_s: Seconds outside of the program, without waiting for a plan.
    """

    forward: PassFigures
    backward: PassFigures
    waiting: float
    rest_s: float

    @classmethod
    def of(
        cls, forward: ActionSums, backward: ActionSums, *, actions: float, rest_s: float
    ) -> Self:
        """Return the figures of a step.

        Args:
            forward: of all ranks.
            backward: of all ranks.
            actions: measured over predicted time from the first action to the last.
            rest_s: mean over ranks.
        """
        predicted_s = forward.predicted_s + backward.predicted_s
        compute = (forward.measured_s + backward.measured_s) / predicted_s if predicted_s else 1.0
        waiting = actions / compute if compute > 0 else 1.0
        return cls(
            PassFigures.of(forward), PassFigures.of(backward), bounded(waiting), max(0.0, rest_s)
        )


@dataclass(frozen=True, slots=True)
class StepCorrection:
    """Corrects predictions of steps.

    Attributes:
        steps: Measured steps that it rests on; 0 corrects nothing.
        compute: Of forwards and backwards, which plans may be made with.
        waiting: Factor of the time from first action to last beyond what compute explains: gaps
            between actions, messages, waits for those that took longer than others of their kind.
        rest_s: Seconds outside of the program; None: what the cost model says of the update. They
            are no multiple of it: data are read and figures gathered, too.
    """

    steps: int = 0
    compute: CostCorrection = CostCorrection()
    waiting: float = 1.0
    rest_s: float | None = None


NO_CORRECTION = StepCorrection()


@dataclass(frozen=True, slots=True)
class CorrectionHistory:
    """The figures of the last steps, oldest first.

    Attributes:
        figures: One more than a correction rests on, for a plan that is begun while a step runs
            does not know what that step takes.
    """

    figures: tuple[StepFigures, ...] = ()

    def after(self, figures: StepFigures) -> CorrectionHistory:
        """Return the history after one more step."""
        return CorrectionHistory((*self.figures, figures)[-_STEPS - 1 :])

    @property
    def current(self) -> StepCorrection:
        """The correction by all steps so far."""
        return _correction(self.figures[-_STEPS:])

    @property
    def previous(self) -> StepCorrection:
        """The correction without the last step: what was known when the next plan was begun."""
        return _correction(self.figures[:-1])

    def as_json(self) -> list[list[float]]:
        """Return plain values, the same to the last bit when read back."""
        return [
            [*astuple(one.forward), *astuple(one.backward), one.waiting, one.rest_s]
            for one in self.figures
        ]

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Return the history that :meth:`as_json` made plain values of.

        Raises:
            ValueError: they are none of a history.
        """
        each = len(fields(PassFigures))
        if not isinstance(values, list) or len(values) > _STEPS + 1:
            raise ValueError(f"a history of corrections is a list of at most {_STEPS + 1} steps")
        figures = []
        for row in values:
            if not _is_step(row, 2 * each + 2):
                raise ValueError(f"a step of a history of corrections is {row!r}")
            forward, backward = PassFigures(*row[:each]), PassFigures(*row[each : 2 * each])
            figures.append(StepFigures(forward, backward, *row[2 * each :]))
        return cls(tuple(figures))


def _is_step(row: Any, count: int) -> bool:
    """Return whether plain values are those of a step."""
    return (
        isinstance(row, list)
        and len(row) == count
        and all(isinstance(value, float) and np.isfinite(value) for value in row)
    )


def _correction(figures: Sequence[StepFigures]) -> StepCorrection:
    if not figures:
        return NO_CORRECTION
    forward, forward_launch_s = _of_pass([one.forward for one in figures])
    backward, backward_launch_s = _of_pass([one.backward for one in figures])
    return StepCorrection(
        steps=len(figures),
        compute=CostCorrection(forward, backward, forward_launch_s, backward_launch_s),
        waiting=bounded(statistics.median(one.waiting for one in figures)),
        rest_s=statistics.median(one.rest_s for one in figures),
    )


def _of_pass(figures: Sequence[PassFigures]) -> tuple[float, float]:
    """Return the factor, and the seconds of launches for one layer.

    The factor is of what launches leave, so that both together are right of the median step.
    """
    known = [one.launch_s for one in figures if one.launch_s >= 0]
    launch_s = statistics.median(known) if known else 0.0
    factor = statistics.median(one.ratio - launch_s * one.layers_per_s for one in figures)
    return bounded(factor), launch_s


def bounded(factor: float) -> float:
    """Return a factor within its bounds."""
    return min(max(factor, 1 / MOST_FACTOR), MOST_FACTOR)
