"""Validations between the steps of a run: when, of what, and what follows from their results.

Which validation was the best, and how many followed it, is read from ``validation.jsonl``: a
resumed run continues from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sppo.report.validation import (
    PositionMetrics,
    ValidationMetrics,
    improvement_text,
    perplexity_of,
    progress_of,
    validation_line,
)
from sppo.schedule.actions import Action
from sppo.training.job import Job
from sppo.training.state import TrainingState
from sppo.training.validation.checked import CheckedValidation
from sppo.training.validation.evaluate import EvaluatedSet, evaluate_set
from sppo.training.validation.sums import SetLosses


@dataclass(frozen=True, slots=True)
class DoneValidation:
    """Results and measurements of one validation."""

    records: Sequence[ValidationMetrics]
    """Results of the sets."""
    line: str
    is_best: bool
    """Whether these weights are the best so far."""
    seconds: float
    peak_bytes: int
    """Largest device memory held by this rank."""


class Validator:
    """Validations of one run.

    Args:
        job: Job that trains the run.
        state: Training state of this rank.
        checked: Sets and plan of the validations.
        history: Results of the validations so far.
    """

    def __init__(
        self,
        job: Job,
        state: TrainingState,
        checked: CheckedValidation,
        *,
        history: Sequence[ValidationMetrics],
    ) -> None:
        self._job, self._state, self._checked = job, state, checked
        self._config, self._watched = checked.config, checked.watched
        self._last_step = history[-1].step if history else None
        num_labels = checked.num_labels
        self.progress = progress_of(
            # Losses of a set that was another before do not compare.
            [record for record in history if record.labels == num_labels.get(record.set)],
            watched=self._watched,
            least=self._config.min_improvement,
        )
        """Best validation so far, and how many followed it."""

    def is_due(self, step: int) -> bool:
        """Return whether a validation after a number of steps is due, and was not made yet."""
        if step == self._last_step:
            return False
        if step == 0:
            return self._config.at_start
        return step % self._config.every == 0 or step == self._job.run.train.steps

    @property
    def keeps_best(self) -> bool:
        """True if the best checkpoint is kept."""
        return self._config.keep_best

    @property
    def why_stop(self) -> str | None:
        """Why the run ends early; None if it goes on."""
        most, progress = self._config.stop_after, self.progress
        if most is None or progress.without_improvement < most:
            return None
        return improvement_text(progress, watched=self._watched)

    def run(
        self,
        step: int,
        *,
        before_round: Callable[[], object],
        before_action: Callable[[int, Action], None],
    ) -> DoneValidation:
        """Evaluate all sets. Collective.

        Args:
            step: Number of steps done.
            before_round: Called between sequences; an error that it raises ends the validation.
            before_action: Called before each action; an error that it raises closes the engine.
        """
        device, engine = self._job.device, self._state.engine
        engine.free_unused()
        device.trim()
        device.reset_peak()
        began_s, found = time.perf_counter(), []
        for own in self._checked.sets:
            set_began_s = time.perf_counter()
            losses = evaluate_set(
                self._job,
                engine,
                own,
                before_round=before_round,
                before_action=before_action,
            )
            (seconds,) = self._job.peers.largest([time.perf_counter() - set_began_s])
            found.append(_metrics(step, own, losses, seconds=seconds))
        # What the engine counted belongs to no step.
        engine.take_peaks()
        engine.take_copies()
        before, self._last_step = self.progress, step
        self.progress = progress_of(
            found, watched=self._watched, least=self._config.min_improvement, before=before
        )
        return DoneValidation(
            found,
            validation_line(found, watched=self._watched, before=before),
            is_best=self.progress.without_improvement == 0,
            seconds=time.perf_counter() - began_s,
            peak_bytes=device.peak_bytes(),
        )


def _metrics(
    step: int, own: EvaluatedSet, losses: SetLosses, *, seconds: float
) -> ValidationMetrics:
    """Return the result of a set after so many steps."""
    loss = losses.loss
    return ValidationMetrics(
        step=step,
        set=own.plan.name,
        loss=loss,
        perplexity=perplexity_of(loss),
        labels=losses.num_labels,
        sequences=own.plan.num_samples,
        accuracy=losses.accuracy,
        exact=losses.exact if own.are_documents else None,
        by_position=tuple(
            PositionMetrics(start=one.start, end=one.end, loss=one.loss, labels=one.num_tokens)
            for one in losses.by_position
        ),
        seconds=seconds,
    )
