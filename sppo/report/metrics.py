"""Metrics of every step, and the file that stores them, ``metrics.jsonl``."""

from __future__ import annotations

import json
import logging
import math
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from sppo.output_file import write_text
from sppo.report.expert_load import ExpertMetrics

_logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
Record = TypeVar("Record")

NanIfNull = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""Number that may not be finite, and is null in the file then."""


@dataclass(frozen=True, slots=True)
class SourceMetrics:
    """Figures of one source of a mixture in one step, of all replicas."""

    tokens: int
    """Tokens of the source that the step trained on."""
    labels: int
    """Number of valid labels of the source."""
    loss: NanIfNull
    """Mean loss of these labels in nats; NaN without labels. The sum of the losses times the labels
    of all sources is the loss of the step times its labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Figures of one optimizer step, measured unless the field says otherwise."""

    step: int
    """Number of the step, counted from 1."""
    loss: NanIfNull
    """Mean cross entropy in nats per label; may be NaN or infinite in a step whose update was
    skipped, and is NaN in a step without valid labels."""
    grad_norm: NanIfNull
    """Global norm of the gradients before clipping."""
    clipped: float | None = None
    """Factor by which gradients were scaled to ``optimizer.clip_norm``; 1 if they were not clipped,
    None if the update was skipped and in files of older versions."""
    norms: dict[str, dict[str, NanIfNull]] | None = None
    """Norms of weights and of gradients before clipping, ``weight`` and ``gradient``, by kind of
    parameter: embed, attention, mlp, norm, head. Every ``train.norms_every`` steps, else None."""
    lr: float
    """Scheduled learning rate of the step, also if the update was skipped."""
    tokens: int
    """Tokens trained in the step, of all replicas, without padding."""
    labels: int | None = None
    """Number of valid labels, over which the loss is averaged: fewer than tokens with isolated
    documents or a loss mask, and 0 if no label counts. None in files of older versions."""
    step_s: float
    """Wall time of the step, on the slowest rank."""
    predicted_step_s: float | None = None
    """Predicted step time; in a run of samples corrected by measured times of earlier steps. None
    without a prediction."""
    tokens_per_s: float
    """Tokens of the step divided by its wall time."""
    mfu: float | None = None
    """Model FLOPs per second, as a fraction of the peak of all devices; None on a CPU,
    whose peak is shared with other programs."""
    hfu: float | None = None
    """Executed FLOPs per second, recomputation included, as a fraction of the peak of all
    devices; None on a CPU."""
    device_peak_bytes: int | None = None
    """Peak device memory in the step, on the rank with the highest; on a CPU the peak of the
    process's resident set."""
    host_peak_bytes: int | None = None
    """Host memory reserved for offloaded tensors, or for slots in front of a disk, with training
    state behind the device; sum over the ranks, 0 on a CPU."""
    offloaded_bytes: int = 0
    """Bytes copied from the device to another tier in the step; sum over the ranks."""
    exposed_copy_s: float = 0.0
    """Time in which compute waited for copies, on the rank that waited longest."""
    copy_out_bytes_per_s: float | None = None
    """Rate of copies from the device on rank 0, while their slowest queue was busy; None if
    there were none."""
    copy_back_bytes_per_s: float | None = None
    """Rate of copies back to the device on rank 0, while their slowest queue was busy; None if
    there were none."""
    disk_peak_bytes: int = 0
    """Bytes of the files of a disk tier, and of training state on the disk; sum over the ranks."""
    experts: ExpertMetrics | None = None
    """Load of the experts; None for a model without experts."""
    sources: dict[str, SourceMetrics] | None = None
    """Figures of each source of ``data.sources`` by name; None without a mixture."""
    samples: int | None = None
    """Number of samples of the step; None, like all fields below but `skipped`, in a run of the
    token stream."""
    split_subsequences: int | None = None
    """Number of subsequences that are a slice of a long sample."""
    batched_subsequences: int | None = None
    """Number of subsequences of short samples."""
    hybrid_subsequences: int | None = None
    """Number of subsequences of the tail of a long sample and short samples."""
    padding_tokens: int | None = None
    """Number of padding tokens, which belong to no sample."""
    planned_bubble_fraction: float | None = None
    """Simulated idle share of pipeline ranks, mean over replicas; None without a pipeline."""
    bubble_fraction: float | None = None
    """Measured share of the ranks' time in which no forward or backward ran, without the update;
    None without a pipeline."""
    program_digest: str | None = None
    """Digest of the program that the first replica ran."""
    planning_wait_s: float | None = None
    """Time in which the step waited for its plan, on the rank that waited longest."""
    uncorrected_step_s: float | None = None
    """Step time predicted by the cost model without correction by earlier steps."""
    correction_steps: int | None = None
    """Number of earlier steps on which the correction is based, at most seven."""
    skipped: bool = False
    """True if the update was skipped: loss or gradients were not finite, or no label was valid."""


class JsonlSink:
    """Sink that writes one JSON object per line and record; non-finite numbers are null.

    Lines that do not fit on the disk are removed again, so every line of the file is complete.

    Args:
        path: Path of the file, which is appended to, or created.
        resume_step: Number of steps done before; 0 for a new run. Lines of later steps, written by
            a run that ended before its next checkpoint, are removed, and so are incomplete lines,
            so that the file has each record once.
        kind: Type of the records, a dataclass with a ``step``.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: Path, *, resume_step: int, kind: type[Any] = StepMetrics) -> None:
        if path.exists():
            records = _records(path, kind).values()
            text = "".join(f"{line}\n" for record, line in records if record.step <= resume_step)
            if text != path.read_text(encoding="utf-8", errors="replace"):
                write_text(path, text)
        self._path = path
        self._file = path.open("ab", buffering=0)

    def write(self, *records: Any) -> None:
        """Append records as lines of JSON, unbuffered: all of them, or on an error none."""
        lines = (json.dumps(finite_or_none(asdict(record)), allow_nan=False) for record in records)
        left = "".join(f"{line}\n" for line in lines).encode("utf-8")
        whole_bytes = os.fstat(self._file.fileno()).st_size
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(whole_bytes)
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[StepMetrics]:
    """Read the steps in a ``metrics.jsonl``, sorted by step.

    A null is read as NaN unless the field may be None. Lines that are not the complete record of a
    step are left out with a warning, and unknown keys are ignored.

    Raises:
        ValueError: The file does not exist.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a run writes {METRICS_FILE} into its output")
    records = _records(path, StepMetrics)
    return [records[key][0] for key in sorted(records)]


def read_records(path: Path, kind: type[Record]) -> list[Record]:
    """Return the records of a file of JSON lines in their order; [] if there is no file.

    Lines that are not complete records are left out with a warning.
    """
    return [record for record, _ in _records(path, kind).values()] if path.is_file() else []


def finite_or_none(value: Any) -> Any:
    """Return ``value`` with None for NaN and infinite floats, which JSON cannot represent."""
    if isinstance(value, dict):
        return {key: finite_or_none(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_none(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _records(path: Path, kind: type[Record]) -> dict[Any, tuple[Record, str]]:
    """Return the record in each line that is a complete one, and the line, by step and set."""
    found: dict[Any, tuple[Record, str]] = {}
    left_out: list[int] = []
    adapter = TypeAdapter(kind)
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record: Any = adapter.validate_json(line, strict=True)
            found[record.step, getattr(record, "set", "")] = record, line
        except ValidationError:
            if line.strip("\0 \t\r"):  # a crash of the machine can leave zeros
                left_out.append(number)
    if left_out:
        _logger.warning(
            "%s: %d of %d lines are left out, the first of them line %d: torn, or not the record "
            "of a step",
            path,
            len(left_out),
            len(lines),
            left_out[0],
        )
    return found
