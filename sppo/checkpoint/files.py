"""Checkpoint directories: their names and metadata; made and deleted by one rename each.

``checkpoints/step_000012/`` is always complete; ``best`` is a link to the best of them.
``step_000012.partial-<pid>`` is being written, and ``step_000012.deleting-<pid>`` is being deleted;
if found later, both are leftovers of a killed run.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sppo.config import RunConfig
from sppo.output_file import sync_directory
from sppo.version import __version__

CHECKPOINTS_DIRECTORY = "checkpoints"
"""Name of the directory of checkpoints in a run's output directory."""

BEST = "best"
"""Name of the link to the best checkpoint, if a run keeps it."""

METADATA_FILE = "metadata.json"
"""File of a checkpoint with the configuration of the run and its position in the data."""

_logger = logging.getLogger(__name__)
_COMPLETE = re.compile(r"step_(\d{6,})")
_LEFTOVER = re.compile(r"(?:step_\d{6,}|best)\.(?:partial|deleting)-\d+")


def run_metadata(
    config: RunConfig,
    *,
    sequences_consumed: int,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the metadata of a checkpoint: all that a resumed run needs besides the tensors.

    Args:
        config: Run configuration.
        sequences_consumed: Number of sequences, or of samples in a run of samples, consumed so
            far: the position in the data, which is the only state of its order.
        more: Further state that a resumed run needs, as plain values.
    """
    return {
        **more,
        "sequences_consumed": sequences_consumed,
        "sppo_version": __version__,
        "config": config.model_dump(mode="json"),
    }


def step_name(step: int) -> str:
    """Return the directory name of a checkpoint, e.g. ``step_000012``."""
    return f"step_{step:06d}"


def is_step_name(name: str) -> bool:
    """Return whether ``name`` is the directory name of a complete checkpoint."""
    return _COMPLETE.fullmatch(name) is not None


def partial_path(directory: Path, *, step: int) -> Path:
    """Return the path of the checkpoint of ``step`` while this process writes it."""
    return directory / f"{step_name(step)}.partial-{os.getpid()}"


def list_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of every checkpoint in ``directory``, newest first, without verifying."""
    if not directory.is_dir():
        return []
    # A second time if the first finds none: if a run publishes a checkpoint and deletes another
    # while the names are read, the listing may contain neither.
    return _listed(directory) or _listed(directory)


def _listed(directory: Path) -> list[tuple[int, Path]]:
    found = [
        (int(match.group(1)), path)
        for path in directory.iterdir()
        if (match := _COMPLETE.fullmatch(path.name)) and path.is_dir()
    ]
    return sorted(found, reverse=True)


def publish(partial: Path, target: Path) -> None:
    """Rename a complete ``partial`` to ``target`` durably, replacing an existing ``target``.

    An existing ``target`` is known to be damaged: a run resumes from the newest valid checkpoint,
    so it repeats only steps whose checkpoints are damaged.
    """
    sync_directory(partial)
    aside = _set_aside(target) if target.exists() else None
    partial.rename(target)
    sync_directory(target.parent)
    if aside is not None:
        shutil.rmtree(aside)


def link_best(directory: Path, *, step: int) -> None:
    """Make the checkpoint of ``step`` the best one: one rename of a link."""
    link = directory / f"{BEST}.partial-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(step_name(step))
    link.replace(directory / BEST)
    sync_directory(directory)


def best_checkpoint(directory: Path) -> Path | None:
    """Return the path of the best checkpoint, which may be gone; None if none is kept."""
    link = directory / BEST
    return directory / link.readlink() if link.is_symlink() else None


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint; rename it first, so that a kill leaves no partial checkpoint."""
    shutil.rmtree(_set_aside(path))


def _set_aside(path: Path) -> Path:
    aside = path.with_name(f"{path.name}.deleting-{os.getpid()}")
    if aside.exists():
        shutil.rmtree(aside)
    return path.rename(aside)


def remove_leftovers(directory: Path) -> None:
    """Delete partial checkpoints of killed runs: half written, or half deleted.

    Only one run at a time writes into a directory, so no running process uses these names.
    """
    if not directory.is_dir():
        return
    for path in sorted(directory.iterdir()):
        if _LEFTOVER.fullmatch(path.name):
            _logger.info("removing %s, left by a run that was killed", path)
            path.unlink() if path.is_symlink() else shutil.rmtree(path)
