"""The newest undamaged checkpoint of a run, from which a run is resumed or its weights are read."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sppo.checkpoint.files import (
    CHECKPOINTS_DIRECTORY,
    METADATA_FILE,
    is_step_name,
    list_checkpoints,
    step_name,
)
from sppo.checkpoint.manifest import Damage, find_absence, find_damage
from sppo.config.json_file import read_json
from sppo.quoting import one_line, quoted

_logger = logging.getLogger(__name__)


class InvalidCheckpointError(ValueError):
    """No checkpoint was found where one is required, or all checkpoints found are damaged."""


class NoCheckpointError(InvalidCheckpointError):
    """No checkpoint was found where one is required."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files were verified."""

    path: Path
    step: int
    """Number of optimizer steps done when the checkpoint was saved."""
    metadata: dict[str, Any]
    """Metadata of the run (:func:`~sppo.checkpoint.files.run_metadata`), with ``step``
    added."""


def find_checkpoint(path: Path | str) -> Checkpoint:
    """Find and verify the checkpoint at ``path``, of a run the newest; changes nothing.

    Args:
        path: Output directory of a run, its ``checkpoints`` directory, or one ``step_...`` in it.

    Raises:
        NoCheckpointError: There is no checkpoint.
        InvalidCheckpointError: All checkpoints are damaged.
    """
    place, is_one = _place(Path(path))
    checkpoint = _one(place) if is_one else newest_valid(place)[0]
    if checkpoint is None:
        raise _none_at(Path(path))
    return checkpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint that was verified before: look for its files, and read its metadata.

    Raises:
        NoCheckpointError: There is no such directory.
        InvalidCheckpointError: Files are missing, or the metadata is damaged.
    """
    if not path.is_dir():
        raise NoCheckpointError(f"checkpoint {path} is not there")
    opened = find_absence(path) or _open(path)
    if isinstance(opened, Damage):
        raise InvalidCheckpointError(f"checkpoint {path} is damaged: {opened}")
    return opened


def check_any(path: Path | str) -> None:
    """Raise NoCheckpointError if there is no checkpoint at ``path``; verifies none.

    Args:
        path: As in :func:`find_checkpoint`.

    Raises:
        NoCheckpointError: There is no checkpoint, neither valid nor damaged.
    """
    place, is_one = _place(Path(path))
    if not is_one and not list_checkpoints(place):
        raise _none_at(Path(path))


def _place(path: Path) -> tuple[Path, bool]:
    """Return the directory of checkpoints at ``path``, or ``path`` and True if it is to be one."""
    below = path / CHECKPOINTS_DIRECTORY
    if below.is_dir():
        return below, False
    return path, (path / METADATA_FILE).exists() or is_step_name(path.name)


def _none_at(path: Path) -> NoCheckpointError:
    return NoCheckpointError(
        f"{path} holds no checkpoint{'' if path.is_dir() else ' (no such directory)'}: "
        f"give a run's output directory, which contains {CHECKPOINTS_DIRECTORY}/"
        f"{step_name(12)} or the like, or one such checkpoint"
    )


def newest_valid(directory: Path) -> tuple[Checkpoint | None, set[Path]]:
    """Return the newest undamaged checkpoint, and the paths of newer, damaged ones.

    Returns (None, set()) if there is no checkpoint.

    Raises:
        InvalidCheckpointError: All checkpoints are damaged.
    """
    while (found := _newest(directory)) is None:
        pass  # a run deleted a checkpoint during the search, and has a newer one
    return found


def _newest(directory: Path) -> tuple[Checkpoint | None, set[Path]] | None:
    """Return the result of :func:`newest_valid`; None if a run deleted a checkpoint meanwhile."""
    damages: dict[Path, Damage] = {}
    for _, path in list_checkpoints(directory):
        opened = find_damage(path) or _open(path)
        if isinstance(opened, Checkpoint):
            for bad, damage in damages.items():
                _logger.warning("checkpoint %s is damaged: %s; using %s", bad, damage, path.name)
            return opened, set(damages)
        if not path.is_dir():
            return None
        damages[path] = opened
    if damages:
        raise InvalidCheckpointError(
            f"every checkpoint in {directory} is damaged: "
            + "; ".join(f"{path.name}: {damage}" for path, damage in damages.items())
            + ". Restore one, or move the directory away to start anew"
        )
    return None, set()


def _one(path: Path) -> Checkpoint:
    """Return the checkpoint at ``path`` itself, verified."""
    opened = find_damage(path) or _open(path)
    if not path.is_dir():
        raise InvalidCheckpointError(
            f"{path} is not a directory; a checkpoint is one" + _deleted(path)
        )
    if isinstance(opened, Damage):
        raise InvalidCheckpointError(f"checkpoint {path} is damaged: {opened}; use another one")
    return opened


def _deleted(path: Path) -> str:
    """Return a hint for messages if the run has deleted the checkpoint at ``path``, else ""."""
    if path.exists() or not list_checkpoints(path.parent):
        return ""
    return f". A run keeps its newest ones: name {path.parent}, and the newest is read"


def _open(path: Path) -> Checkpoint | Damage:
    """Return the checkpoint at ``path``, whose files were verified, or a fault in its metadata."""
    try:
        metadata = read_json(path / METADATA_FILE)
        step = metadata["step"]
        if type(step) is not int or step < 0:
            raise ValueError(f"step {quoted(step)} is not a whole number of at least 0")
        return Checkpoint(path, step=step, metadata=metadata)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Damage(METADATA_FILE, f"cannot be used: {one_line(error)}")
