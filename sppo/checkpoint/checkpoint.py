"""Checkpoints of a run: saved atomically, verified before use, the newest few kept.

``OUTPUT/checkpoints/step_000012/`` holds the tensors (torch.distributed.checkpoint, keys are
global names, one file for each rank that wrote), ``metadata.json`` and ``manifest.json``. Step k
means after k optimizer steps. Nothing in it depends on how many ranks there were: any number of
them, each with its blocks of the tensors, may go on from it.
"""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from sppo.checkpoint.files import (
    METADATA_FILE,
    list_checkpoints,
    partial_path,
    publish,
    remove_checkpoint,
    remove_leftovers,
    step_name,
)
from sppo.checkpoint.manifest import FileSum, find_absence, sum_files, why_absent, write_manifest
from sppo.checkpoint.ranks import TIMEOUT_S, CheckpointRanks
from sppo.checkpoint.search import (
    Checkpoint,
    InvalidCheckpointError,
    find_checkpoint,
    held_checkpoint,
    newest_valid,
)
from sppo.checkpoint.state_block import StateBlock, as_blocks
from sppo.checkpoint.tensors import (
    BlockKey,
    block_bytes,
    check_fits,
    load_tensors,
    read_tensors,
    save_tensors,
    saved_shapes,
    silence_single_process_warning,
)
from sppo.config import RunConfig
from sppo.output_file import write_json
from sppo.units import MIB, format_bytes, format_duration
from sppo.version import __version__

__all__ = [
    "MODEL_PREFIX",
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "InvalidCheckpointError",
    "StateBlock",
    "find_checkpoint",
    "read_model",
    "read_weights",
    "run_metadata",
]

MODEL_PREFIX = "model."
"""Prefix of the keys under which fp32 weights are saved."""

_logger = logging.getLogger(__name__)
_OVERHEAD_BYTES = MIB  # metadata, manifest, directories


class CheckpointError(OSError):
    """A checkpoint could not be written: the disk is full, or another fault of it."""

    def __str__(self) -> str:
        return self.strerror or super().__str__()


def run_metadata(
    config: RunConfig,
    *,
    sequences_consumed: int,
    tokens_sha256: str | None = None,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the metadata of a checkpoint: all that is needed to go on, besides the tensors.

    Args:
        config: of the run.
        sequences_consumed: the position in the data, the only state of its order: sequences, or
            samples of a run of samples.
        tokens_sha256: of the token data, so that a run goes on with the same one.
        more: that steps go on from, as plain values.
    """
    return {
        **more,
        "sequences_consumed": sequences_consumed,
        "tokens_sha256": tokens_sha256,
        "sppo_version": __version__,
        "config_digest": config.digest(),
        "config": config.model_dump(mode="json"),
    }


class CheckpointManager:
    """Saves, keeps and finds the checkpoints of one run.

    With several ranks each has a manager, and every method is collective: all ranks call it with
    the same step, and all return or all raise the same. Rank 0 makes room, verifies and publishes;
    every rank writes and reads its own blocks, in a directory that all of them see.

    Args:
        directory: ``OUTPUT/checkpoints``; made at the first save. One run at a time writes there.
        keep: how many checkpoints stay on the disk, at least one.
        async_save: copy the state to CPU memory, then write it while training goes on. Takes
            as much host memory as the state for as long as the write lasts.
        group: of all ranks, which make their managers at the same time, for these talk over gloo
            groups of their own. None: one process, which saves alone.
        timeout_s: how long a rank waits for what others do with a checkpoint.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        async_save: bool,
        group: ProcessGroup | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        assert keep >= 1, f"keep is {keep}; CheckpointConfig checks this"
        self.directory = directory
        self._keep = keep
        self._ranks = CheckpointRanks(group, timeout_s=timeout_s)
        self._writer = ThreadPoolExecutor(1, "checkpoint") if async_save else None
        # The writing thread must not meet a search for checkpoints in one group's collectives.
        self._writing_ranks = self._ranks
        if async_save:
            self._writing_ranks = CheckpointRanks(group, timeout_s=timeout_s)
        self._in_flight: Future[None] | None = None
        self._current_step: int | None = None
        self._damaged: set[Path] = set()

    def save(
        self,
        state: Mapping[str, Tensor | StateBlock],
        *,
        step: int,
        metadata: Mapping[str, Any],
    ) -> None:
        """Write the checkpoint of ``step``, then delete all but the newest ``keep``.

        Does nothing if ``step`` is what was saved or loaded last. With ``async_save`` it returns
        once the state is copied; the caller may change the tensors then.

        Args:
            state: what this rank holds, by global name, on any device: blocks of tensors, or
                whole ones. Blocks that several ranks hold are written once.
            step: optimizer steps done.
            metadata: JSON-able, see :func:`run_metadata`; that of rank 0 is saved.

        Raises:
            CheckpointError: this or the previous background save failed, on any rank. Nothing
                partial stays, and earlier checkpoints are as they were.
            PeerLostError: here and below, that another rank has ended. Something partial may stay
                until the next save.
        """
        self.wait()
        if step == self._current_step:
            return
        blocks = as_blocks(state)
        sizes = self._ranks.gather(lambda: block_bytes(blocks))
        needed = self._ranks.on_first(lambda: self._make_room(sizes, step=step))
        silence_single_process_warning()  # here, because warning filters are not thread-safe
        if self._writer is None:
            self._write(blocks, step, metadata, needed)
        else:
            staged = self._ranks.on_all(lambda: _copies(blocks))
            self._in_flight = self._writer.submit(self._write, staged, step, dict(metadata), needed)
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

        Reads all of it, on rank 0, and changes nothing. A warning names each newer one that is
        damaged.

        Raises:
            InvalidCheckpointError: there are checkpoints, and all are damaged.
        """
        checkpoint, self._damaged = self._ranks.on_first(lambda: newest_valid(self.directory))
        return checkpoint

    def load_into(self, checkpoint: Checkpoint, state: Mapping[str, Tensor | StateBlock]) -> None:
        """Fill the tensors of ``state`` in place; tensors it does not name are not read.

        Args:
            checkpoint: saved by any number of ranks.
            state: what this rank holds, cut in any way; need not cover the tensors.

        Raises:
            ValueError: the checkpoint lacks some or has them in another shape; names them. Or a
                rank does not see what rank 0 has found. Nothing is changed.
        """
        blocks = as_blocks(state)
        self._ranks.on_all(lambda: self._check_loadable(checkpoint.path, blocks))
        self._ranks.on_all(lambda: load_tensors(checkpoint.path, into=blocks))
        self._current_step = checkpoint.step

    def _check_loadable(self, path: Path, blocks: Mapping[str, StateBlock]) -> None:
        absence = None if self._ranks.is_first else find_absence(path)
        if absence is not None:
            raise InvalidCheckpointError(
                f"rank {self._ranks.rank} does not see checkpoint {path} as rank 0 does: "
                f"{absence}; {why_absent(alone=False)}"
            )
        check_fits(path, blocks)

    def _make_room(self, sizes: Sequence[Mapping[BlockKey, int]], *, step: int) -> int:
        """Bytes that the blocks of all ranks need; there is a directory with as many free."""
        # By key, for replicas are written once.
        blocks = {key: size for of_rank in sizes for key, size in of_rank.items()}
        needed = sum(blocks.values()) + _OVERHEAD_BYTES
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.directory)
            if shutil.disk_usage(self.directory).free < needed:
                raise OSError(errno.ENOSPC, "not enough free space")
        except OSError as error:
            raise _save_error(error, step=step, directory=self.directory, needed=needed) from error
        return needed

    def _write(
        self, state: Mapping[str, StateBlock], step: int, metadata: Mapping[str, Any], needed: int
    ) -> None:
        started, ranks = time.perf_counter(), self._writing_ranks
        own = partial_path(self.directory, step=step)
        try:
            partial = ranks.on_first(lambda: _made(own))
            written = save_tensors(state, directory=partial, ranks=ranks)
            sums = ranks.gather(lambda: sum_files(written))
            ranks.on_first(lambda: self._publish(partial, sums, step=step, metadata=metadata))
        except OSError as error:
            raise self._give_up(own, error, step=step, needed=needed) from error
        except BaseException:
            # A rank may be gone, so the others are not asked; what stays, the next save removes.
            if ranks.is_first:
                shutil.rmtree(own, ignore_errors=True)
            raise
        ranks.on_first(lambda: self._conclude(step, sums, took_s=time.perf_counter() - started))

    def _publish(
        self,
        partial: Path,
        sums: Sequence[Mapping[str, FileSum]],
        *,
        step: int,
        metadata: Mapping[str, Any],
    ) -> None:
        """Complete what all ranks have written."""
        about = partial / METADATA_FILE
        write_json(about, {"step": step, **metadata})
        all_sums = [*sums, sum_files([about])]
        files = {name: file for of in all_sums for name, file in of.items()}
        write_manifest(partial, files, alone=len(sums) == 1)
        publish(partial, self.directory / step_name(step))

    def _give_up(self, own: Path, error: OSError, *, step: int, needed: int) -> CheckpointError:
        """Remove what all ranks have begun; what to raise."""

        def undo() -> CheckpointError:
            shutil.rmtree(own, ignore_errors=True)
            return _save_error(error, step=step, directory=self.directory, needed=needed)

        return self._writing_ranks.on_first(undo)

    def _conclude(self, step: int, sums: Sequence[Mapping[str, FileSum]], *, took_s: float) -> None:
        size = format_bytes(sum(file.size_bytes for files in sums for file in files.values()))
        target = self.directory / step_name(step)
        _logger.info("saved %s (%s) in %s", target, size, format_duration(took_s))
        self._prune(step)

    def _prune(self, step: int) -> None:
        """Delete what the complete checkpoint of ``step`` makes superfluous."""
        damaged = {path for path in self._damaged if path.name != step_name(step)}
        whole = [path for _, path in list_checkpoints(self.directory) if path not in damaged]
        for path in [*whole[self._keep :], *damaged]:
            try:
                if not remove_checkpoint(path):
                    _logger.info("%s is being read and stays until the next save", path)
            except OSError as error:
                _logger.warning("old checkpoint %s cannot be deleted: %s", path, error.strerror)
        self._damaged = {path for path in damaged if path.exists()}


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def _copies(state: Mapping[str, StateBlock]) -> dict[str, StateBlock]:
    """Return CPU copies of blocks that the caller may change while ``state`` is being written."""
    return {
        name: replace(block, tensor=block.tensor.detach().to("cpu", copy=True))
        for name, block in state.items()
    }


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
    checkpoint, weights = read_weights(path)
    return checkpoint.metadata, weights


def read_weights(path: Path | str) -> tuple[Checkpoint, dict[str, Tensor]]:
    """The checkpoint that :func:`find_checkpoint` finds, and its fp32 weights by global name.

    A run may go on saving meanwhile: what is read here, it deletes later.
    """
    while True:
        with held_checkpoint(path) as checkpoint:
            try:
                return checkpoint, _model_tensors(checkpoint.path)
            except Exception:
                if checkpoint.path.is_dir():
                    raise
        # Deleted all the same, by a run on a file system without locks: it has a newer one.


def _model_tensors(directory: Path) -> dict[str, Tensor]:
    names = [name for name in saved_shapes(directory) if name.startswith(MODEL_PREFIX)]
    tensors = read_tensors(directory, names=names)
    return {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in tensors.items()}


def _newest(directory: Path) -> str:
    """Return, as text, the checkpoint that a run which ends now goes on from."""
    with suppress(OSError):
        for step, path in list_checkpoints(directory):
            return f"the newest is {path.name}: what was trained after step {step} is lost"
    return "there is none: all that was trained is lost"


def _save_error(error: OSError, *, step: int, directory: Path, needed: int) -> CheckpointError:
    try:
        free = f"{shutil.disk_usage(directory).free} are free"
    except OSError:
        free = "the free space cannot be read"
    return CheckpointError(
        error.errno or errno.EIO,
        f"cannot save step {step} in {directory}: {error.strerror or error}; it needs {needed} "
        f"bytes ({format_bytes(needed)}) and {free}. Free some space or set train.output to "
        f"another disk; earlier checkpoints are untouched, and {_newest(directory)}",
    )
