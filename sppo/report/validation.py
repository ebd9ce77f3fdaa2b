"""Results of validations: ``validation.jsonl``, the line of each, and which is the best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sppo.report.metrics import NanIfNull
from sppo.units import format_duration

VALIDATION_FILE = "validation.jsonl"
_LARGEST_EXPONENT = 700


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionMetrics:
    """Labels at positions ``[start, end)`` of their sequence or document."""

    start: int
    end: int
    loss: NanIfNull
    """Mean loss in nats per label."""
    labels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationMetrics:
    """Result of one set in one validation."""

    step: int
    """Number of optimizer steps done."""
    set: str
    """Name of the set."""
    loss: NanIfNull
    """Mean cross entropy in nats per label."""
    perplexity: NanIfNull
    labels: int
    """Number of labels that count."""
    sequences: int
    """Number of sequences, or of samples."""
    accuracy: float | None = None
    """Fraction of the labels that are the most likely token."""
    exact: float | None = None
    """Fraction of the documents all of whose labels are; None for sequences of a stream."""
    by_position: tuple[PositionMetrics, ...]
    """Losses by position, in ranges that double in width."""
    seconds: float
    """Wall time of the set."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Which validation was the best so far, and how many followed it without improvement.

    Attributes:
        best: Best value; None before the first one that is a number.
        best_step: Its step.
        without_improvement: Validations since.
    """

    best: float | None = None
    best_step: int = 0
    without_improvement: int = 0


def perplexity_of(loss: float) -> float:
    """Return the perplexity of a mean loss in nats; infinity beyond the range of a float."""
    return math.exp(loss) if not loss >= _LARGEST_EXPONENT else math.inf


def progress_of(
    records: Iterable[ValidationMetrics],
    *,
    watched: tuple[str, str],
    least: float,
    before: Progress | None = None,
) -> Progress:
    """Return the progress after some validations; NaN and infinity never improve.

    Args:
        records: Results in the order of their steps.
        watched: Name of the watched set, and what is watched of it: loss, accuracy or exact.
        least: Least change that counts as an improvement.
        before: Progress before them.
    """
    found, (name, measure) = before or Progress(), watched
    sign = -1 if measure == "loss" else 1
    for record in records:
        if record.set != name:
            continue
        value = getattr(record, measure)
        # Of weights that give no numbers, no figure says how good they are.
        if value is None or not math.isfinite(record.loss):
            value = math.nan
        gain = math.inf if found.best is None else sign * (value - found.best)
        if math.isfinite(value) and gain > 0 and gain >= least:
            found = Progress(value, record.step)
        else:
            found = replace(found, without_improvement=found.without_improvement + 1)
    return found


def validation_line(
    records: Sequence[ValidationMetrics], *, watched: tuple[str, str], before: Progress
) -> str:
    """Return the line of a validation: each set, the best before, and the time.

    Args:
        records: Results of the sets.
        watched: Name of the watched set, and what is watched of it.
        before: Progress before this validation.

    Example:
        ``validation 50 | held_out 2.431 acc 41.0% (best 2.440 at 0) | needle 0.113 acc 97.5%
        exact 92.0% | 12.3 s``
    """
    fields = [f"validation {records[0].step}"]
    for record in records:
        text = f"{record.set} {record.loss:.3f}"
        for label, value in (("acc", record.accuracy), ("exact", record.exact)):
            text += "" if value is None else f" {label} {value:.1%}"
        if record.set == watched[0] and before.best is not None:
            text += f" (best {_value(before.best, watched[1])} at {before.best_step})"
        fields.append(text)
    fields.append(format_duration(sum(record.seconds for record in records)))
    return " | ".join(fields)


def improvement_text(progress: Progress, *, watched: tuple[str, str]) -> str:
    """Return what was watched for how long without improvement, as the reason of an early stop."""
    name, measure = watched
    best = "none" if progress.best is None else _value(progress.best, measure)
    count = progress.without_improvement
    return (
        f"{count} validation{'s' * (count != 1)} without improvement of {measure} on {name}: the "
        f"best is {best} at step {progress.best_step}"
    )


def _value(value: float, measure: str) -> str:
    return f"{value:.3f}" if measure == "loss" else f"{value:.1%}"
