"""Metrics of every step, and the file they go to: ``metrics.jsonl``.

Sinks get plain numbers. Whoever makes them reads the device once a step; nothing here does.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from sppo.output_file import write_text

_logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step, as measured unless a field says otherwise."""

    step: int
    """Counted from 1: steps done."""
    loss: float
    """Mean cross entropy, nats per label; NaN or infinite in a step that went wrong, NaN in one
    without labels."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    """Learning rate of the step."""
    tokens: int
    """Tokens trained in this step, of all replicas."""
    labels: int | None = None
    """Labels that the loss is the mean of; with isolated documents fewer than there are tokens,
    and none where every document has one token. None in files from before they were counted."""
    step_s: float
    """Wall time of the step, on the rank that took longest."""
    predicted_step_s: float | None = None
    """Step time that the plan predicts, of samples corrected by what earlier steps took; None where
    it predicts none."""
    tokens_per_s: float
    """Tokens of the step over its wall time."""
    mfu: float | None = None
    """Model FLOPs of the step per second, as a fraction of the device's peak; None if unknown."""
    hfu: float | None = None
    """Executed FLOPs, those of recomputation included, as a fraction of the device's peak."""
    device_peak_bytes: int | None = None
    """Most memory of a device in the step, on the rank with most; on a CPU the peak of the
    process's resident set."""
    host_peak_bytes: int | None = None
    """Host memory reserved for what is offloaded, or on its way to a disk, added up over the
    ranks."""
    offloaded_bytes: int = 0
    """Sent from the device to another tier in this step, added up over the ranks."""
    exposed_copy_s: float = 0.0
    """Time compute waited for copies, on the rank that waited longest."""
    copy_out_bytes_per_s: float | None = None
    """Rate of what was sent, while the slowest queue out was busy; None where nothing was."""
    copy_back_bytes_per_s: float | None = None
    """Rate of copies back to the device in this step."""
    disk_peak_bytes: int = 0
    """Size of the files of a disk tier, added up over the ranks."""
    samples: int | None = None
    """Samples of the step; None, like all that follows from them, in a run of the token stream."""
    split_subsequences: int | None = None
    """Subsequences that are a slice of a long sample."""
    batched_subsequences: int | None = None
    """Subsequences of short samples."""
    hybrid_subsequences: int | None = None
    """Subsequences of the tail of a long sample and short ones."""
    padding_tokens: int | None = None
    """Tokens that belong to no sample."""
    planned_bubble_fraction: float | None = None
    """Idle share of pipeline ranks as simulated, mean over replicas; None without a pipeline."""
    bubble_fraction: float | None = None
    """Share of the time of all ranks in which no forward or backward ran, without the update."""
    program_digest: str | None = None
    """Of the program that the first replica ran."""
    planning_wait_s: float | None = None
    """Time the step waited for its plan, on the rank that waited longest."""
    uncorrected_step_s: float | None = None
    """Step time as the cost model says; ``predicted_step_s`` is corrected by earlier steps."""
    correction_steps: int | None = None
    """Earlier steps that the correction rests on, at most seven; 0 corrects nothing."""
    forward_correction: float | None = None
    """Factor of the predicted time of forwards: median of what those steps measured."""
    backward_correction: float | None = None
    """Factor of the predicted time of backwards."""
    forward_launch_s: float | None = None
    """Time added to the forward of each subsequence in each layer, for launching its kernels."""
    backward_launch_s: float | None = None
    """Time added to the backward of each subsequence in each layer."""
    waiting_correction: float | None = None
    """Factor of the time from first action to last, beyond what compute explains."""
    predicted_rest_s: float | None = None
    """Predicted time outside of the program: reading data, adding up gradients, the update."""
    prediction_error: float | None = None
    """Predicted over measured step time, less 1."""
    skipped: bool = False
    """The update was left out: loss or gradients were not finite, or no label counts."""


_MAY_BE_NONE = frozenset(f.name for f in fields(StepMetrics) if f.default is None)
_KINDS: dict[str, tuple[type, ...]] = {f.name: (int, float) for f in fields(StepMetrics)} | {
    "step": (int,),
    "skipped": (bool,),
    "program_digest": (str,),
}
"""Types of the fields."""
_LARGEST_COUNT = 1 << 53
"""Above any count of steps, tokens or bytes; a float is exact below it."""


class MetricSink(Protocol):
    """Takes the metrics of every step."""

    def write(self, metrics: StepMetrics) -> None:
        """Record one step; steps come in order."""
        ...

    def close(self) -> None:
        """Record what is still under way; the sink takes no more."""
        ...


class JsonlSink:
    """One JSON object per line and step, written at once; non-finite numbers are null.

    A line that finds no room is taken back, so every line of the file is whole.

    Args:
        path: appended to, or made.
        resume_step: the run goes on after this step (0: from the beginning). Lines of later steps,
            written by a run that died before its next checkpoint, are dropped, as is a line torn
            by a kill, so every step stands there once.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, *, resume_step: int) -> None:
        _drop_after(path, step=resume_step)
        self._path = path
        self._file = path.open("ab", buffering=0)

    def write(self, metrics: StepMetrics) -> None:
        """Append one JSON line, and flush it."""
        record = {name: finite_or_none(value) for name, value in asdict(metrics).items()}
        line = (json.dumps(record, allow_nan=False) + "\n").encode("utf-8")
        whole_bytes = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) or 0 :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(whole_bytes)
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[StepMetrics]:
    """The steps in a ``metrics.jsonl``, by step; a null where a number must be reads as NaN.

    Lines that are not the whole record of a step are counted in a warning and left out, keys this
    version does not know ignored.

    Raises:
        ValueError: no such file.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a run writes {METRICS_FILE} into its output")
    steps: dict[int, StepMetrics] = {}
    for metrics, _ in _records(path):
        steps[metrics.step] = metrics
    return [steps[step] for step in sorted(steps)]


def finite_or_none(value: Any) -> Any:
    """Return ``value``, or None for a float that JSON has no word for."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drop_after(path: Path, *, step: int) -> None:
    if not path.exists():
        return
    kept = {metrics.step: line for metrics, line in _records(path) if metrics.step <= step}
    text = "".join(f"{line}\n" for line in kept.values())
    if text != path.read_text(encoding="utf-8", errors="replace"):
        write_text(path, text)


def _records(path: Path) -> Iterator[tuple[StepMetrics, str]]:
    """Each line that is the whole record of a step, and its text."""
    left_out: list[int] = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip("\0 \t\r"):  # a crash of the machine can leave zeros
            continue
        metrics = _parse(line)
        if metrics is None:
            left_out.append(number)
        else:
            yield metrics, line
    if left_out:
        _logger.warning(
            "%s: %d of %d lines are left out, the first of them line %d: torn, or not the record "
            "of a step",
            path,
            len(left_out),
            len(lines) - 1 if not lines[-1] else len(lines),
            left_out[0],
        )


def _parse(line: str) -> StepMetrics | None:
    """The step that a line records; None where it does not record one."""
    try:
        record = json.loads(line)
        values = {name: record[name] for name in _KINDS if name in record}
        metrics = StepMetrics(**{name: _checked(name, value) for name, value in values.items()})
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    return metrics if metrics.step > 0 else None


def _checked(name: str, value: Any) -> Any:
    """A field's value; a null where a number must be is NaN.

    Raises:
        TypeError: it is of another type.
        OverflowError: a count above any that there is.
    """
    kind = _KINDS[name]
    if value is None:
        if name in _MAY_BE_NONE:
            return None
        value = math.nan
    if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kind):
        raise TypeError(f"{name} is {value!r}")
    if isinstance(value, int) and abs(value) >= _LARGEST_COUNT:
        raise OverflowError(f"{name} has {value.bit_length()} bits")
    return value
