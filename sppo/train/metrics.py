"""What is known after every step, and the file it goes to: ``metrics.jsonl``.

Sinks get plain numbers. Whoever makes them reads the device once a step; nothing here does.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from sppo.train.durable_files import write_text

METRICS_FILE = "metrics.jsonl"
"""Inside a run's output directory."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step, as measured unless a field says otherwise."""

    step: int
    """Counted from 1: steps done."""
    loss: float
    """Mean cross entropy, nats per label; NaN or infinite in a step that went wrong."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    tokens: int
    """Trained in this step."""
    step_s: float
    predicted_step_s: float | None = None
    """Of the plan; None as long as none predicts it."""
    tokens_per_s: float
    mfu: float | None = None
    """Model FLOPs of the step per second, as a share of the device's peak; None if unknown."""
    hfu: float | None = None
    """The same with the FLOPs of recomputation counted."""
    device_peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    offloaded_bytes: int = 0
    """Sent from the device to another tier in this step."""
    exposed_copy_s: float = 0.0
    """Time compute waited for copies."""
    copy_out_bytes_per_s: float | None = None
    """Rate of what was sent, while the slowest queue out was busy; None where nothing was."""
    copy_back_bytes_per_s: float | None = None
    """The same of what came back."""
    disk_peak_bytes: int = 0
    """Size of the file of a disk tier."""
    skipped: bool = False
    """The update was left out because loss or gradients were not finite."""


_MAY_BE_NONE = frozenset(f.name for f in fields(StepMetrics) if f.default is None)


class MetricSink(Protocol):
    """Takes the metrics of every step."""

    def write(self, metrics: StepMetrics) -> None:
        """Record one step; steps come in order."""
        ...

    def close(self) -> None:
        """Record what is still under way; the sink takes no more."""
        ...


class JsonlSink:
    """One JSON object per line and step, flushed at once; non-finite numbers are null.

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
        self._file = path.open("a", encoding="utf-8")

    def write(self, metrics: StepMetrics) -> None:
        """See :class:`MetricSink`."""
        record = {name: finite_or_none(value) for name, value in asdict(metrics).items()}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """See :class:`MetricSink`."""
        self._file.close()


def read_metrics(path: Path) -> list[StepMetrics]:
    """The steps in a ``metrics.jsonl``, by step; a null where a number must be reads as NaN.

    Lines that are torn are left out, keys this version does not know ignored.

    Raises:
        ValueError: no such file, or a line without the fields of a step.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a run writes {METRICS_FILE} into its output")
    steps: dict[int, StepMetrics] = {}
    for record, _ in _records(path):
        metrics = _from_record(record, path)
        steps[metrics.step] = metrics
    return [steps[step] for step in sorted(steps)]


def finite_or_none(value: Any) -> Any:
    """``value``, or None for a float that JSON has no word for."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _from_record(record: dict[str, Any], path: Path) -> StepMetrics:
    known = {f.name for f in fields(StepMetrics)}
    values: dict[str, Any] = {
        name: math.nan if value is None and name not in _MAY_BE_NONE else value
        for name, value in record.items()
        if name in known
    }
    try:
        return StepMetrics(**values)
    except TypeError as error:
        raise ValueError(f"{path}: step {record['step']} is incomplete: {error}") from None


def _drop_after(path: Path, *, step: int) -> None:
    if not path.exists():
        return
    kept = {record["step"]: line for record, line in _records(path) if record["step"] <= step}
    text = "".join(f"{line}\n" for line in kept.values())
    if text != path.read_text(encoding="utf-8", errors="replace"):
        write_text(path, text)


def _records(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Each line that is the whole record of a step, and its text."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip("\0 \t\r"):  # a crash of the machine can leave zeros
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield record, line
        else:
            _logger.warning("%s: line %d is torn and left out", path, number)
