"""The tier behind the device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class Tier:
    """Where moved tensors wait."""

    kind: Literal["host", "disk"]
    directory: Path | None = None
    """Of a disk: where its file is made."""

    def __post_init__(self) -> None:
        assert (self.directory is None) == (self.kind == "host"), "a disk has a directory"
