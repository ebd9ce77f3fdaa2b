"""Checkpoint directories: where they lie, and how they appear and disappear, always by one rename.

``checkpoints/step_000012/`` is complete by construction. ``step_000012.partial-<pid>`` is being
written and ``step_000012.deleting-<pid>`` being deleted; found later, both are what a killed run
left behind.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sppo.output_file import sync_directory

CHECKPOINTS_DIRECTORY = "checkpoints"
"""Inside a run's output directory."""

METADATA_FILE = "metadata.json"
"""File of a checkpoint that says what the run was and where it stood."""

_logger = logging.getLogger(__name__)
_COMPLETE = re.compile(r"step_(\d{6,})")
_LEFTOVER = re.compile(r"step_\d{6,}\.(?:partial|deleting)-\d+")


def step_name(step: int) -> str:
    """Return ``step_000012``."""
    return f"step_{step:06d}"


def is_step_name(name: str) -> bool:
    """Return whether ``name`` is that of a complete checkpoint."""
    return _COMPLETE.fullmatch(name) is not None


def partial_path(directory: Path, *, step: int) -> Path:
    """Return the path of the checkpoint of ``step`` while this process writes it."""
    return directory / f"{step_name(step)}.partial-{os.getpid()}"


def list_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of every checkpoint in ``directory``, newest first, unverified."""
    if not directory.is_dir():
        return []
    # Twice where the first look finds none: a run that publishes one and deletes another while the
    # names are read may show neither.
    return _listed(directory) or _listed(directory)


def _listed(directory: Path) -> list[tuple[int, Path]]:
    found = [
        (int(match.group(1)), path)
        for path in directory.iterdir()
        if (match := _COMPLETE.fullmatch(path.name)) and path.is_dir()
    ]
    return sorted(found, reverse=True)


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """Keep runs from deleting the checkpoint at ``path``; yields False where it is gone already.

    A shared lock of its directory, which a run that deletes it asks for alone. Where the file
    system has no locks nothing is kept, and a reader must look whether it is still there.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield path.is_dir()
        return
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        # It may have been renamed between opening and locking.
        yield path.is_dir() and os.path.samestat(path.stat(), os.fstat(descriptor))
    finally:
        os.close(descriptor)


def publish(partial: Path, target: Path) -> None:
    """Rename a complete ``partial`` to ``target``, in place of what lies there, durably.

    What lies there is a checkpoint already known to be damaged: a run resumes from the newest
    valid one, so it meets again only the steps whose checkpoints it could not use.
    """
    sync_directory(partial)
    aside = _set_aside(target) if target.exists() else None
    partial.rename(target)
    sync_directory(target.parent)
    if aside is not None:
        shutil.rmtree(aside)


def remove_checkpoint(path: Path) -> bool:
    """Delete a checkpoint so that a kill in the middle leaves no half of it under its name.

    Returns:
        Whether it was: one that is :func:`held` stays.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _is_held(descriptor):
            return False
        aside = _set_aside(path)
    finally:
        os.close(descriptor)
    shutil.rmtree(aside)
    return True


def _is_held(descriptor: int) -> bool:
    """Lock a directory alone; return whether others hold it. Without locks nobody does."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _set_aside(path: Path) -> Path:
    aside = path.with_name(f"{path.name}.deleting-{os.getpid()}")
    if aside.exists():
        shutil.rmtree(aside)
    return path.rename(aside)


def remove_leftovers(directory: Path) -> None:
    """Delete what killed runs left half written or half deleted.

    One run at a time writes into a directory, so whatever bears these names is dead.
    """
    if not directory.is_dir():
        return
    for path in sorted(directory.iterdir()):
        if _LEFTOVER.fullmatch(path.name):
            _logger.info("removing %s, left by a run that was killed", path)
            shutil.rmtree(path)
