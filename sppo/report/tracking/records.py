"""Records of a run as trackers receive them: names and numbers, read from files that grow."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sppo.report.metrics import METRICS_FILE
from sppo.report.validation import VALIDATION_FILE

_SECTIONS = {
    "train": ("loss", "grad_norm", "clipped", "lr", "skipped"),
    "speed": (
        *("step_s", "predicted_step_s", "tokens_per_s", "mfu", "hfu", "exposed_copy_s"),
        *("copy_out_bytes_per_s", "copy_back_bytes_per_s"),
    ),
    "memory": ("device_peak_bytes", "host_peak_bytes", "offloaded_bytes"),
}
"""Metrics of a step by section; a tracker calls them ``section/metric``."""
_OF_VALIDATION = ("loss", "perplexity", "accuracy", "exact")
_OF_SOURCE = ("loss", "tokens", "labels")
_NAN_IF_NULL = ("train/loss", "train/grad_norm")
"""Numbers that are null in the file if they are not finite, not because they are unknown."""


@dataclass(frozen=True, slots=True)
class Record:
    """Numbers of one step, or of one set of a validation."""

    kind: str
    """``steps``, or ``validation/SET``. The records of one kind have increasing steps."""
    step: int
    """Number of optimizer steps done."""
    values: Mapping[str, float]
    """Numbers by name, such as ``train/loss``."""


def record_of_step(line: Mapping[str, Any]) -> Record:
    """Return the record of a line of ``metrics.jsonl``.

    Losses by source are called ``sources/NAME/loss``, norms ``norms/attention/weight``. Of the
    loads of experts there are those of the most uneven layers, ``experts/largest`` and
    ``experts/entropy``.
    """
    values: dict[str, float] = {}
    for section, names in _SECTIONS.items():
        values |= _numbers(section, names, line)
    for name, source in (line.get("sources") or {}).items():
        values |= _numbers(f"sources/{name}", _OF_SOURCE, source)
    for kind, norms in (line.get("norms") or {}).items():
        values |= _numbers(f"norms/{kind}", ("weight", "gradient"), norms)
    if experts := line.get("experts"):
        values["experts/largest"] = max(experts["largest"])
        values["experts/entropy"] = min(experts["entropy"])
    values |= {name: math.nan for name in _NAN_IF_NULL if name not in values}
    return Record("steps", line["step"], values)


def record_of_validation(line: Mapping[str, Any]) -> Record:
    """Return the record of a line of ``validation.jsonl``; names are ``validation/SET/loss``."""
    kind = f"validation/{line['set']}"
    return Record(kind, line["step"], _numbers(kind, _OF_VALIDATION, line))


def _numbers(section: str, names: tuple[str, ...], line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line that are known, by ``section/name``."""
    found = {f"{section}/{name}": line.get(name) for name in names}
    return {name: float(value) for name, value in found.items() if value is not None}


class RecordFiles:
    """Records in the files of a run's directory; each is yielded once, as soon as it is complete.

    A file that was replaced, as a resumed run does, is read again from its beginning.
    """

    def __init__(self, directory: Path) -> None:
        self._files = (
            _GrowingFile(directory / METRICS_FILE, record_of_step),
            _GrowingFile(directory / VALIDATION_FILE, record_of_validation),
        )

    def new_records(self) -> Iterator[Record]:
        """Yield the records that no earlier call yielded."""
        for file in self._files:
            yield from file.new_records()


class _GrowingFile:
    """File of JSON lines that another process appends to."""

    def __init__(self, path: Path, parse: Callable[[Mapping[str, Any]], Record]) -> None:
        self._path, self._parse = path, parse
        self._inode, self._offset = -1, 0

    def new_records(self) -> Iterator[Record]:
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset = status.st_ino, 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                with suppress(ValueError, KeyError, AttributeError, TypeError):  # a torn line
                    yield self._parse(json.loads(line))
