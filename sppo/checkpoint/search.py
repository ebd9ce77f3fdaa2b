"""The checkpoint to go on from, or to read: the newest that is whole."""

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
"""Directories of a name that may be mistyped."""
_MOST_RUNS = 1000
_SHOWN_RUNS = 3
_ALIKE = 0.5
"""Ratio of :mod:`difflib` from which on two names are taken for one and a slip of it."""


class InvalidCheckpointError(ValueError):
    """A checkpoint that must be there cannot be found, or none of those found is whole."""


class NoCheckpointError(InvalidCheckpointError):
    """A checkpoint is missing where one must be."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint whose files were verified."""

    path: Path
    step: int
    """Optimizer steps done when it was saved."""
    metadata: dict[str, Any]
    """Metadata of the run (:func:`~sppo.checkpoint.checkpoint.run_metadata`), with ``step``
    added."""


def find_checkpoint(path: Path | str) -> Checkpoint:
    """The checkpoint that ``path`` stands for, verified; changes nothing.

    Args:
        path: a run's output directory, its ``checkpoints`` or one ``step_...`` in there.

    Raises:
        NoCheckpointError: there is none.
        InvalidCheckpointError: none is whole.
    """
    with held_checkpoint(path) as checkpoint:
        return checkpoint


@contextmanager
def held_checkpoint(path: Path | str) -> Iterator[Checkpoint]:
    """Yield the checkpoint that ``path`` stands for, verified, which no run deletes meanwhile.

    Args:
        path: as for :func:`find_checkpoint`.

    Raises:
        NoCheckpointError: there is none.
        InvalidCheckpointError: none is whole.
    """
    path = Path(path)
    below = path / CHECKPOINTS_DIRECTORY
    with ExitStack() as stack:
        if below.is_dir():
            checkpoint, _ = stack.enter_context(_newest_held(below))
        elif (path / METADATA_FILE).exists() or is_step_name(path.name):
            checkpoint = stack.enter_context(_one_held(path))
        else:
            checkpoint, _ = stack.enter_context(_newest_held(path))
        if checkpoint is None:
            raise _none_at(path)
        yield checkpoint


def check_any(path: Path | str) -> None:
    """Make sure that there is a checkpoint to find at ``path``, whole or not; reads none.

    Args:
        path: as for :func:`find_checkpoint`.

    Raises:
        NoCheckpointError: there is none.
    """
    path = Path(path)
    below = path / CHECKPOINTS_DIRECTORY
    is_one = (path / METADATA_FILE).exists() or is_step_name(path.name)
    if not (is_one and not below.is_dir()) and not list_checkpoints(
        below if below.is_dir() else path
    ):
        raise _none_at(path)


def _none_at(path: Path) -> NoCheckpointError:
    return NoCheckpointError(
        f"{path} holds no checkpoint{'' if path.is_dir() else ' (no such directory)'}: "
        f"give a run's output directory, which contains {CHECKPOINTS_DIRECTORY}/"
        f"{step_name(12)} or the like, or one such checkpoint{_runs_nearby(path)}"
    )


def _runs_nearby(path: Path) -> str:
    """Return ". Did you mean runs/mine?", or the runs there are in its place, or nothing."""
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
    """The newest undamaged checkpoint, and the paths of those that are newer."""
    with _newest_held(directory) as found:
        return found


@contextmanager
def _newest_held(directory: Path) -> Iterator[tuple[Checkpoint | None, set[Path]]]:
    """Yield what :func:`newest_valid` returns, which no run deletes meanwhile."""
    with ExitStack() as stack:
        while (found := _newest(directory, stack)) is None:
            stack.close()
        yield found


def _newest(directory: Path, stack: ExitStack) -> tuple[Checkpoint | None, set[Path]] | None:
    """Return what :func:`newest_valid` does, held by ``stack``; None where a run deleted one."""
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
def _one_held(path: Path) -> Iterator[Checkpoint]:
    """The checkpoint at ``path``, which stays until the end of the context."""
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
        yield opened


def _deleted(path: Path) -> str:
    """Return what to do where the run has deleted its old checkpoint, else nothing."""
    if path.exists() or not list_checkpoints(path.parent):
        return ""
    return f". A run keeps its newest ones: name {path.parent}, and the newest is read"


def _open(path: Path) -> Checkpoint | Damage:
    """The checkpoint at ``path``, whose files are known to be as they were written."""
    try:
        metadata = read_json(path / METADATA_FILE)
        step = metadata["step"]
        if type(step) is not int or step < 0:
            raise ValueError(f"step {quoted(step)} is not a whole number of at least 0")
        return Checkpoint(path, step=step, metadata=metadata)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Damage(METADATA_FILE, f"cannot be used: {one_line(error)}")
