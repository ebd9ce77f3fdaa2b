"""Checkpoints of a run: saved atomically, verified before use, the newest few kept.

``OUTPUT/checkpoints/step_000012/`` holds the tensors (torch.distributed.checkpoint, keys are
global names), ``metadata.json`` and ``manifest.json``. Step k means after k optimizer steps.
"""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from json import JSONDecodeError, loads
from pathlib import Path
from typing import Any

from torch import Tensor

from sppo import __version__
from sppo.config import RunConfig
from sppo.train.checkpoint_files import (
    CHECKPOINTS_DIRECTORY,
    METADATA_FILE,
    is_step_name,
    list_checkpoints,
    partial_path,
    publish,
    remove_checkpoint,
    remove_leftovers,
    step_name,
)
from sppo.train.checkpoint_manifest import Damage, find_damage, write_manifest
from sppo.train.checkpoint_tensors import (
    load_tensors,
    read_tensors,
    save_tensors,
    saved_shapes,
    silence_single_process_warning,
    state_bytes,
)
from sppo.train.durable_files import write_json
from sppo.units import MIB, format_bytes, format_duration

MODEL_PREFIX = "model."
"""Of the keys under which fp32 weights are saved."""

_logger = logging.getLogger(__name__)
_OVERHEAD_BYTES = MIB  # metadata, manifest, directories


class CheckpointError(OSError):
    """A checkpoint could not be written: the disk is full, or another fault of it."""

    def __str__(self) -> str:
        return self.strerror or super().__str__()


class InvalidCheckpointError(ValueError):
    """No checkpoint to be found where one must be, or none that is whole."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint whose files were verified."""

    path: Path
    step: int
    """Optimizer steps done when it was saved."""
    metadata: dict[str, Any]
    """See :func:`run_metadata`; ``step`` is added."""


def run_metadata(
    config: RunConfig, *, sequences_consumed: int, tokens_sha256: str | None = None
) -> dict[str, Any]:
    """What a checkpoint says about its run: all that is needed to go on, besides the tensors.

    Args:
        config: of the run.
        sequences_consumed: the position in the data, the only state of its order.
        tokens_sha256: of the token data, so that a run goes on with the same one.
    """
    return {
        "sequences_consumed": sequences_consumed,
        "tokens_sha256": tokens_sha256,
        "sppo_version": __version__,
        "config_digest": config.digest(),
        "config": config.model_dump(mode="json"),
    }


class CheckpointManager:
    """Saves, keeps and finds the checkpoints of one run.

    Args:
        directory: ``OUTPUT/checkpoints``; made at the first save. One run at a time writes there.
        keep: how many checkpoints stay on the disk, at least one.
        async_save: copy the state to CPU memory, then write it while training goes on. Takes
            as much host memory as the state for as long as the write lasts.
    """

    def __init__(self, directory: Path, *, keep: int, async_save: bool) -> None:
        assert keep >= 1, f"keep is {keep}; CheckpointConfig checks this"
        self.directory = directory
        self._keep = keep
        self._writer = ThreadPoolExecutor(1, "checkpoint") if async_save else None
        self._in_flight: Future[None] | None = None
        self._current_step: int | None = None
        self._damaged: set[Path] = set()

    def save(self, state: Mapping[str, Tensor], *, step: int, metadata: Mapping[str, Any]) -> None:
        """Write the checkpoint of ``step``, then delete all but the newest ``keep``.

        Does nothing if ``step`` is what was saved or loaded last. With ``async_save`` it returns
        once the state is copied; the caller may change the tensors then.

        Args:
            state: tensors by global name, on any device.
            step: optimizer steps done.
            metadata: JSON-able, see :func:`run_metadata`.

        Raises:
            CheckpointError: this or the previous background save failed. Nothing partial stays,
                and earlier checkpoints are as they were.
        """
        self.wait()
        if step == self._current_step:
            return
        self._make_room(state, step=step)
        silence_single_process_warning()  # here, because warning filters are not thread-safe
        if self._writer is None:
            self._write(state, step, metadata)
        else:
            staged = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
            self._in_flight = self._writer.submit(self._write, staged, step, dict(metadata))
        self._current_step = step

    def wait(self) -> None:
        """Return when the background save, if any, is on the disk.

        Raises:
            CheckpointError: it failed. Reported once; another save may be tried.
        """
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return
        try:
            in_flight.result()
        except BaseException:
            self._current_step = None
            raise

    def latest_valid(self) -> Checkpoint | None:
        """The newest checkpoint whose files are all as they were written; None if there is none.

        Reads all of it, changes nothing. A warning names each newer one that is damaged.

        Raises:
            InvalidCheckpointError: there are checkpoints, and all are damaged.
        """
        checkpoint, damaged = _newest_valid(self.directory)
        self._damaged = damaged
        return checkpoint

    def load_into(self, checkpoint: Checkpoint, state: Mapping[str, Tensor]) -> None:
        """Fill the tensors of ``state`` in place; tensors it does not name are not read.

        Raises:
            ValueError: the checkpoint lacks some or has them in another shape; names them.
        """
        load_tensors(checkpoint.path, into=state)
        self._current_step = checkpoint.step

    def _make_room(self, state: Mapping[str, Tensor], *, step: int) -> None:
        needed = state_bytes(state) + _OVERHEAD_BYTES
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.directory)
            if shutil.disk_usage(self.directory).free < needed:
                raise OSError(errno.ENOSPC, "not enough free space")
        except OSError as error:
            raise _save_error(error, step=step, directory=self.directory, needed=needed) from error

    def _write(self, state: Mapping[str, Tensor], step: int, metadata: Mapping[str, Any]) -> None:
        started = time.perf_counter()
        partial = partial_path(self.directory, step=step)
        target = self.directory / step_name(step)
        try:
            partial.mkdir()
            save_tensors(state, directory=partial)
            write_json(partial / METADATA_FILE, {"step": step, **metadata})
            write_manifest(partial)
            publish(partial, target)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            needed = state_bytes(state) + _OVERHEAD_BYTES
            raise _save_error(error, step=step, directory=self.directory, needed=needed) from error
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        took = format_duration(time.perf_counter() - started)
        _logger.info("saved %s (%s) in %s", target, format_bytes(state_bytes(state)), took)
        self._prune(step)

    def _prune(self, step: int) -> None:
        """Delete what the complete checkpoint of ``step`` makes superfluous."""
        damaged = {path for path in self._damaged if path.name != step_name(step)}
        whole = [path for _, path in list_checkpoints(self.directory) if path not in damaged]
        for path in [*whole[self._keep :], *damaged]:
            try:
                remove_checkpoint(path)
            except OSError as error:
                _logger.warning("old checkpoint %s cannot be deleted: %s", path, error.strerror)
        self._damaged = set()


def read_model(path: Path | str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The weights of a run's newest valid checkpoint, or of one particular checkpoint.

    Args:
        path: a run's output directory, its ``checkpoints`` or one ``step_...`` in there.

    Returns:
        The checkpoint's metadata (see :func:`run_metadata`, with ``step``) and the fp32 weights on
        the CPU by global name.

    Raises:
        InvalidCheckpointError: no checkpoint there, or none that is whole.
    """
    checkpoint = find_checkpoint(path)
    names = [name for name in saved_shapes(checkpoint.path) if name.startswith(MODEL_PREFIX)]
    tensors = read_tensors(checkpoint.path, names=names)
    weights = {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in tensors.items()}
    return checkpoint.metadata, weights


def find_checkpoint(path: Path | str) -> Checkpoint:
    """The checkpoint that ``path`` stands for, verified; changes nothing.

    Args:
        path: as for :func:`read_model`.

    Raises:
        InvalidCheckpointError: no checkpoint there, or none that is whole.
    """
    path = Path(path)
    below = path / CHECKPOINTS_DIRECTORY
    if below.is_dir():
        checkpoint, _ = _newest_valid(below)
    elif (path / METADATA_FILE).exists() or is_step_name(path.name):
        return _open_one(path)
    else:
        checkpoint, _ = _newest_valid(path)
    if checkpoint is None:
        raise InvalidCheckpointError(
            f"{path} holds no checkpoint: give a run's output directory, which contains "
            f"{CHECKPOINTS_DIRECTORY}/{step_name(12)} or the like, or one such checkpoint"
        )
    return checkpoint


def _open_one(path: Path) -> Checkpoint:
    if not path.is_dir():
        raise InvalidCheckpointError(f"{path} is not a directory; a checkpoint is one")
    damage = find_damage(path)
    opened = damage or _open(path)
    if isinstance(opened, Damage):
        raise InvalidCheckpointError(f"checkpoint {path} is damaged: {opened}; use another one")
    return opened


def _newest_valid(directory: Path) -> tuple[Checkpoint | None, set[Path]]:
    """The newest undamaged checkpoint, and the paths of those that are newer."""
    damages: dict[Path, Damage] = {}
    for _, path in list_checkpoints(directory):
        opened = find_damage(path) or _open(path)
        if isinstance(opened, Checkpoint):
            for bad, damage in damages.items():
                _logger.warning("checkpoint %s is damaged: %s; using %s", bad, damage, path.name)
            return opened, set(damages)
        damages[path] = opened
    if damages:
        raise InvalidCheckpointError(
            f"every checkpoint in {directory} is damaged: "
            + "; ".join(f"{path.name}: {damage}" for path, damage in damages.items())
            + ". Restore one, or move the directory away to start anew"
        )
    return None, set()


def _open(path: Path) -> Checkpoint | Damage:
    """The checkpoint at ``path``, whose files are known to be as they were written."""
    try:
        metadata = loads((path / METADATA_FILE).read_text(encoding="utf-8"))
        return Checkpoint(path, step=metadata["step"], metadata=metadata)
    except (OSError, JSONDecodeError, KeyError, TypeError) as error:
        return Damage(METADATA_FILE, f"cannot be used: {error}")


def _save_error(error: OSError, *, step: int, directory: Path, needed: int) -> CheckpointError:
    try:
        free = f"{shutil.disk_usage(directory).free} are free"
    except OSError:
        free = "the free space cannot be read"
    return CheckpointError(
        error.errno or errno.EIO,
        f"cannot save step {step} in {directory}: {error.strerror or error}; it needs {needed} "
        f"bytes ({format_bytes(needed)}) and {free}. Free some space or set train.output to "
        "another disk; earlier checkpoints are untouched",
    )
