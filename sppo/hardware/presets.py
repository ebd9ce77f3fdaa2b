"""Hardware presets: descriptions of common GPU machines and a laptop that come with SPPO.

They are files like those of `sppo bench -o`, with *analytic* rates and the source of each figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sppo.hardware.description import HardwareSpec
from sppo.hardware.file import read_hardware

_DIRECTORY = Path(__file__).with_name("machines")
PRESETS: Mapping[str, HardwareSpec] = {
    name: read_hardware(_DIRECTORY / f"{name}.json")
    for name in sorted(path.stem for path in _DIRECTORY.glob("*.json"))
}
"""Hardware presets by name."""
