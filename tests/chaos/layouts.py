"""Layouts of runs that faults strike: two ranks each, a small model and a few steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.conftest import write_run, write_tokens

STEPS = 4
ON_DISK = "looped on disk"
"""Layout with copies to a disk."""
_RUN: Mapping[str, Mapping[str, object]] = {
    "model": {"num_layers": 2},
    "sequence": {"length": 32, "num_subsequences": 2},
    "train": {"steps": STEPS},
    "checkpoint": {"every": 2, "keep": 2},
}
LAYOUTS: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "pipeline": {"parallel": {"pipeline_parallel_degree": 2}},
    "ulysses": {"parallel": {"sequence_parallel_degree": 2}},
    "zero 3": {
        "parallel": {"data_parallel_degree": 2, "zero": 3},
        "train": {"sequences_per_step": 2},
    },
    ON_DISK: {
        "model": {"num_layers": 4},
        "parallel": {"pipeline_parallel_degree": 2, "virtual_stages": 2},
        "activations": {"policy": "offload_all", "kv": "offload", "disk": "spill"},
        "state": {"optimizer": "disk", "gradients": "disk"},
    },
    "samples": {
        "parallel": {"data_parallel_degree": 2},
        "data": {"samples": "documents", "tokens": "documents"},
        "planning": {"ahead": False},
        "train": {"samples_per_step": 4},
    },
}
"""Sections of the run file that differ from the common ones, by layout."""


def write_layout(layout: str, directory: Path) -> None:
    """Write the run of a layout, ``run.yaml``, and its inputs into a directory."""
    own = LAYOUTS[layout]
    names = {**_RUN, **own}
    sections = {name: {**_RUN.get(name, {}), **own.get(name, {})} for name in names}
    write_run(directory / "run.yaml", **sections)
    write_tokens(directory / "tokens")
    write_tokens(directory / "documents", documents=range(20, 1200, 23))
    (directory / "spill").mkdir()
