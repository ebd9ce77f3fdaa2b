"""Hardware presets: descriptions of common GPU machines and a laptop that come with SPPO.

They are files like those of `sppo bench -o`, with *analytic* rates and the source of each figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from sppo.hardware.description import HardwareSpec
from sppo.hardware.file import read_hardware

_DIRECTORY = Path(__file__).with_name("machines")


class _Presets(Mapping[str, HardwareSpec]):
    """Hardware presets by name, each read when it is first asked for."""

    def __getitem__(self, name: str) -> HardwareSpec:
        if name not in _names():
            raise KeyError(name)
        return _preset(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_names())

    def __len__(self) -> int:
        return len(_names())


@cache
def _names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _DIRECTORY.glob("*.json")))


@cache
def _preset(name: str) -> HardwareSpec:
    return read_hardware(_DIRECTORY / f"{name}.json")


PRESETS: Mapping[str, HardwareSpec] = _Presets()
