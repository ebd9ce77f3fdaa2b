"""The newest undamaged checkpoint of a run, from which a run is resumed or its weights are read."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from sppo.checkpoint.files import (
    CHECKPOINTS_DIRECTORY,
    METADATA_FILE,
    held,
    is_step_name,
    list_checkpoints,
    step_name,
)
from sppo.checkpoint.manifest import Damage, find_damage
from sppo.config.json_file import read_json
from sppo.quoting import one_line, quoted

_logger = logging.getLogger(__name__)
_MOST_LEVELS = 2
"""Largest number of missing path components for which similar runs are suggested."""
_MOST_RUNS = 1000
_SHOWN_RUNS = 3
_ALIKE = 0.5
"""Similarity of :mod:`difflib` from which on a run is suggested in place of a missing path."""


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
    """Metadata of the run (:func:`~sppo.checkpoint.checkpoint.run_metadata`), with ``step``
    added."""


def find_checkpoint(path: Path | str) -> Checkpoint:
    """Find and verify the checkpoint at ``path``, of a run the newest; changes nothing.

    Args:
        path: Output directory of a run, its ``checkpoints`` directory, or one ``step_...`` in it.

    Raises:
        NoCheckpointError: There is no checkpoint.
        InvalidCheckpointError: All checkpoints are damaged.
    """
    with held_checkpoint(path) as checkpoint:
        return checkpoint


@contextmanager
def held_checkpoint(path: Path | str) -> Iterator[Checkpoint]:
    """Find and verify the checkpoint at ``path``, and prevent its deletion within the context.

    Args:
        path: As in :func:`find_checkpoint`.

    Raises:
        NoCheckpointError: There is no checkpoint.
        InvalidCheckpointError: All checkpoints are damaged.
    """
    path = Path(path)
    place, is_one = _place(path)
    with _one_held(place) if is_one else _newest_held(place) as (checkpoint, _):
        if checkpoint is None:
            raise _none_at(path)
        yield checkpoint


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
        f"{step_name(12)} or the like, or one such checkpoint{_runs_nearby(path)}"
    )


def _runs_nearby(path: Path) -> str:
    """Return ". Did you mean runs/mine?", or a list of the runs beside ``path``, or ""."""
    path = path.parent if path.name == CHECKPOINTS_DIRECTORY else path
    missing = [path.name]
    root = path.parent
    while not root.is_dir() and root.name:
        missing.insert(0, root.name)
        root = root.parent
    pattern = "/".join([*("*" for _ in missing), CHECKPOINTS_DIRECTORY])
    some = islice(root.glob(pattern), _MOST_RUNS) if len(missing) <= _MOST_LEVELS else ()
    runs = sorted(found.parent for found in some if list_checkpoints(found))
    by_name = {str(run.relative_to(root)): run for run in runs}
    close = get_close_matches("/".join(missing), by_name, n=1, cutoff=_ALIKE)
    if close:
        return f". Did you mean {by_name[close[0]]}?"
    shown = ", ".join(str(run) for run in runs[:_SHOWN_RUNS])
    return f". Runs with checkpoints: {shown}" if shown else ""


def newest_valid(directory: Path) -> tuple[Checkpoint | None, set[Path]]:
    """Return the newest undamaged checkpoint, and the paths of newer, damaged ones.

    Returns (None, set()) if there is no checkpoint.

    Raises:
        InvalidCheckpointError: All checkpoints are damaged.
    """
    with _newest_held(directory) as found:
        return found


@contextmanager
def _newest_held(directory: Path) -> Iterator[tuple[Checkpoint | None, set[Path]]]:
    """Yield the result of :func:`newest_valid`; no run deletes the checkpoint in the context."""
    with ExitStack() as stack:
        while (found := _newest(directory, stack)) is None:
            stack.close()
        yield found


def _newest(directory: Path, stack: ExitStack) -> tuple[Checkpoint | None, set[Path]] | None:
    """Return the result of :func:`newest_valid`, with the checkpoint held by ``stack``.

    Returns None if a run deleted a checkpoint during the search, which must then be repeated.
    """
    damages: dict[Path, Damage] = {}
    for _, path in list_checkpoints(directory):
        if not stack.enter_context(held(path)):
            return None
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


@contextmanager
def _one_held(path: Path) -> Iterator[tuple[Checkpoint, set[Path]]]:
    """Yield the checkpoint at ``path``, as :func:`_newest_held` does."""
    with held(path) as is_there:
        if not is_there:
            raise InvalidCheckpointError(
                f"{path} is not a directory; a checkpoint is one" + _deleted(path)
            )
        opened = find_damage(path) or _open(path)
        if isinstance(opened, Damage):
            raise InvalidCheckpointError(
                f"checkpoint {path} is damaged: {opened}; use another one" + _deleted(path)
            )
        yield opened, set()


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
