"""Checkpoints of a run: saved atomically, verified before use, the newest few kept.

``OUTPUT/checkpoints/step_000012/`` holds the tensors (torch.distributed.checkpoint, keys are
global names, one file for each rank that wrote), ``metadata.json`` and ``manifest.json``. Step k
means after k optimizer steps. A checkpoint does not depend on the number of ranks that saved it:
any number of ranks, each with its blocks of the tensors, can resume from it.
"""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from sppo.checkpoint.files import (
    METADATA_FILE,
    best_checkpoint,
    link_best,
    list_checkpoints,
    partial_path,
    publish,
    remove_checkpoint,
    remove_leftovers,
    step_name,
)
from sppo.checkpoint.manifest import FileSum, find_absence, sum_files, why_absent, write_manifest
from sppo.checkpoint.newest import (
    Checkpoint,
    InvalidCheckpointError,
    find_checkpoint,
    newest_valid,
)
from sppo.checkpoint.state_block import Blocks, StateBlock, as_blocks, copied
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
from sppo.output_file import write_json
from sppo.parallel.host_collectives import HostCollectives
from sppo.units import MIB, format_bytes, format_duration

MODEL_PREFIX = "model."
"""Prefix of the keys under which fp32 weights are saved."""

_logger = logging.getLogger(__name__)
_OVERHEAD_BYTES = MIB  # metadata, manifest, directories
_WHY = ", for a checkpoint and for ten times parallel.timeout_s"


class CheckpointError(OSError):
    """A checkpoint could not be written, because the disk is full or failed."""

    def __str__(self) -> str:
        return self.strerror or super().__str__()


class CheckpointManager:
    """Saves, verifies, loads and deletes the checkpoints of one run.

    Each rank has a manager, and every method is collective: all ranks call it with the same step,
    and either all return or all raise the same error. Rank 0 checks disk space, verifies and
    publishes; every rank writes and reads its own blocks, in a directory that all ranks share.

    Args:
        directory: ``OUTPUT/checkpoints``; created at the first save. Only one run at a time may
            write there.
        keep: Number of checkpoints to keep on the disk, at least one.
        async_save: Copy the state to CPU memory, and write it while training continues. During
            the write this takes as much host memory as the state.
        group: Process group of all ranks, which create their managers at the same time, because
            managers communicate over gloo groups of their own. None for a single process.
        timeout_s: Longest time in seconds that a rank waits for the other ranks.
        export: Called on rank 0 with the directory of each checkpoint before it is published, to
            write its weights there once more for other programs; None to write nothing else.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        async_save: bool,
        group: ProcessGroup | None = None,
        timeout_s: float = 7200.0,
        export: Callable[[Path], None] | None = None,
    ) -> None:
        assert keep >= 1, f"keep is {keep}; CheckpointConfig checks this"
        self.directory = directory
        self._keep, self._export = keep, export
        self._writer = ThreadPoolExecutor(1, "checkpoint") if async_save else None
        # A step, a search for checkpoints and the writing thread must not share a group.
        self._ranks, self._writing_ranks = (
            HostCollectives.in_new_group(group, timeout_s=timeout_s, why=_WHY) for _ in range(2)
        )
        self._in_flight: Future[None] | None = None
        self._current_step: int | None = None
        self._is_best = False
        """Whether the checkpoint that is being written is the best one."""
        self._damaged: set[Path] = set()

    def save(
        self,
        state: Mapping[str, Tensor | StateBlock | Sequence[StateBlock]],
        *,
        step: int,
        metadata: Mapping[str, Any],
        is_best: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the checkpoint of ``step``, then delete all but the newest ``keep`` and the best.

        Writes nothing if ``step`` was the last step saved or loaded. With ``async_save`` the method
        returns when the state is copied; the caller may then change the tensors.

        Args:
            state: Tensors that this rank holds, by global name, on any device: blocks, or whole
                tensors. Blocks that several ranks hold are written once.
            step: Number of optimizer steps done.
            metadata: JSON-able metadata, see :func:`~sppo.checkpoint.files.run_metadata`; that of
                rank 0 is saved.
            is_best: Whether the link to the best checkpoint is to point here.
            check: Called once the state was read. Collective: what it raises, the save raises, and
                the checkpoint is not published.

        Raises:
            CheckpointError: This save, or the previous background save, failed on any rank. Partial
                files are removed, and earlier checkpoints are unchanged.
            PeerLostError: Another rank has ended. Partial files may remain until the next save.
        """
        self.wait()
        if step == self._current_step:
            if is_best:
                self._ranks.decided_by_main(lambda: self._link_best(step))
            return
        self._is_best = is_best
        blocks = as_blocks(state)
        sizes = self._ranks.told_to_main(lambda: block_bytes(blocks))
        needed = self._ranks.decided_by_main(lambda: self._make_room(sizes, step=step))
        silence_single_process_warning()  # here, because warning filters are not thread-safe
        if self._writer is None:
            self._write(blocks, step, metadata, needed, check)
        else:
            staged = self._ranks.done_by_all(lambda: copied(blocks))
            check()
            self._in_flight = self._writer.submit(self._write, staged, step, dict(metadata), needed)
        self._current_step = step

    def wait(self) -> None:
        """Wait until the background save, if any, is written to the disk.

        Raises:
            CheckpointError: The save failed. Raised once; another save may be tried.
            PeerLostError: Another rank has ended.
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
        """Return the newest checkpoint whose files are undamaged; None if there is none.

        Rank 0 reads all files of the checkpoint, and changes nothing. A warning names each damaged
        checkpoint that is newer.

        Raises:
            InvalidCheckpointError: There are checkpoints, and all are damaged.
            PeerLostError: Another rank has ended.
        """
        checkpoint, self._damaged = self._ranks.decided_by_main(
            lambda: newest_valid(self.directory)
        )
        return checkpoint

    def load_into(
        self,
        checkpoint: Checkpoint,
        state: Mapping[str, Tensor | StateBlock | Sequence[StateBlock]],
    ) -> None:
        """Fill the tensors of ``state`` in place; other tensors of the checkpoint are not read.

        Args:
            checkpoint: Checkpoint saved by any number of ranks, of this run or of another.
            state: Blocks that this rank holds, of any layout; they need not cover whole tensors.

        Raises:
            ValueError: The checkpoint lacks tensors or has them in other shapes, and the message
                names them; or a rank does not see the files that rank 0 found. No tensor is
                changed.
            PeerLostError: Another rank has ended.
        """
        blocks = as_blocks(state)
        self._ranks.done_by_all(lambda: self._check_loadable(checkpoint.path, blocks))
        self._ranks.done_by_all(lambda: load_tensors(checkpoint.path, into=blocks))
        if checkpoint.path.parent == self.directory:
            self._current_step = checkpoint.step

    def _check_loadable(self, path: Path, blocks: Blocks) -> None:
        absence = None if self._ranks.rank == 0 else find_absence(path)
        if absence is not None:
            raise InvalidCheckpointError(
                f"rank {self._ranks.rank} does not see checkpoint {path} as rank 0 does: "
                f"{absence}; {why_absent(alone=False)}"
            )
        check_fits(path, blocks)

    def _make_room(self, sizes: Sequence[Mapping[BlockKey, int]], *, step: int) -> int:
        """Create the directory, check its free space, and return the bytes that all blocks need.

        Raises:
            CheckpointError: The directory cannot be created, or lacks space.
        """
        # Merged by key, because replicas of a block are written once.
        blocks = {key: size for of_rank in sizes for key, size in of_rank.items()}
        needed = sum(blocks.values()) + _OVERHEAD_BYTES
        if self._export is not None:
            weights = (size for (name, _), size in blocks.items() if name.startswith(MODEL_PREFIX))
            needed += sum(weights) + _OVERHEAD_BYTES
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.directory)
            if shutil.disk_usage(self.directory).free < needed:
                raise OSError(errno.ENOSPC, "not enough free space")
        except OSError as error:
            raise self._save_error(error, step=step, needed=needed) from error
        return needed

    def _write(
        self,
        state: Blocks,
        step: int,
        metadata: Mapping[str, Any],
        needed: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        started, ranks = time.perf_counter(), self._writing_ranks
        own = partial_path(self.directory, step=step)
        try:
            partial = ranks.decided_by_main(lambda: _made(own))
            written = save_tensors(state, directory=partial, ranks=ranks)
            check()
            sums = ranks.told_to_main(lambda: sum_files(written))
            ranks.decided_by_main(
                lambda: self._publish(partial, sums, step=step, metadata=metadata)
            )
        except OSError as error:
            raise self._give_up(own, error, step=step, needed=needed) from error
        except BaseException:
            # A rank may have ended, so this is not collective; the next save removes leftovers.
            if ranks.rank == 0:
                shutil.rmtree(own, ignore_errors=True)
            raise
        ranks.decided_by_main(
            lambda: self._conclude(step, sums, took_s=time.perf_counter() - started)
        )

    def _publish(
        self,
        partial: Path,
        sums: Sequence[Mapping[str, FileSum]],
        *,
        step: int,
        metadata: Mapping[str, Any],
    ) -> None:
        """Add what else belongs to a checkpoint to the files of all ranks; rename the directory."""
        if self._export is not None:
            self._export(partial)
        about = partial / METADATA_FILE
        write_json(about, {"step": step, **metadata})
        all_sums = [*sums, sum_files([about])]
        files = {name: file for of in all_sums for name, file in of.items()}
        write_manifest(partial, files, alone=len(sums) == 1)
        publish(partial, self.directory / step_name(step))

    def _give_up(self, own: Path, error: OSError, *, step: int, needed: int) -> CheckpointError:
        """Remove the partial checkpoint of all ranks, and return the error to raise."""

        def undo() -> CheckpointError:
            shutil.rmtree(own, ignore_errors=True)
            return self._save_error(error, step=step, needed=needed)

        return self._writing_ranks.decided_by_main(undo)

    def _save_error(self, error: OSError, *, step: int, needed: int) -> CheckpointError:
        try:
            free = f"{shutil.disk_usage(self.directory).free} are free"
        except OSError:
            free = "the free space cannot be read"
        return CheckpointError(
            error.errno or errno.EIO,
            f"cannot save step {step} in {self.directory}: {error.strerror or error}; it needs "
            f"{needed} bytes ({format_bytes(needed)}) and {free}. Free some space or set "
            f"train.output to another disk; earlier checkpoints are untouched, and {self._kept()}",
        )

    def _kept(self) -> str:
        """Return a message on the newest whole checkpoint, and on what is lost without a save.

        Checkpoints that were damaged when the run began, or whose files have other sizes than were
        written, are passed over; files are not read again.
        """
        with suppress(OSError):
            for step, path in list_checkpoints(self.directory):
                if path not in self._damaged and find_absence(path) is None:
                    return f"the newest is {path.name}: what was trained after step {step} is lost"
        return "there is none: all that was trained is lost"

    def _conclude(self, step: int, sums: Sequence[Mapping[str, FileSum]], *, took_s: float) -> None:
        size = format_bytes(sum(file.size_bytes for files in sums for file in files.values()))
        target = self.directory / step_name(step)
        _logger.info("saved %s (%s) in %s", target, size, format_duration(took_s))
        if self._is_best:
            self._link_best(step)
        self._prune(step)

    def _link_best(self, step: int) -> None:
        try:
            link_best(self.directory, step=step)
        except OSError as error:
            _logger.warning("the best checkpoint cannot be linked: %s", error.strerror)

    def _prune(self, step: int) -> None:
        """Delete all but the best and the newest ``keep``, and the damaged ones except ``step``."""
        damaged = {path for path in self._damaged if path.name != step_name(step)}
        whole = [path for _, path in list_checkpoints(self.directory) if path not in damaged]
        best = best_checkpoint(self.directory)
        for path in [*(path for path in whole[self._keep :] if path != best), *damaged]:
            try:
                remove_checkpoint(path)
            except OSError as error:
                _logger.warning("old checkpoint %s cannot be deleted: %s", path, error.strerror)
        self._damaged = {path for path in damaged if path.exists()}


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def read_weights(path: Path | str) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Return the checkpoint that :func:`find_checkpoint` finds, and its fp32 weights by name.

    A run may save checkpoints meanwhile: if it deletes the one that is read, a newer one is read.

    Args:
        path: Output directory of a run, its ``checkpoints`` directory, or one ``step_...`` in it.

    Raises:
        InvalidCheckpointError: There is no checkpoint, or all are damaged.
    """
    while True:
        checkpoint = find_checkpoint(path)
        try:
            return checkpoint, model_tensors(checkpoint.path)
        except Exception:
            if checkpoint.path.is_dir():
                raise


def model_tensors(directory: Path) -> dict[str, Tensor]:
    """Return the fp32 weights that the files of a checkpoint hold, by name."""
    names = [name for name in saved_shapes(directory) if name.startswith(MODEL_PREFIX)]
    tensors = read_tensors(directory, names=names)
    return {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in tensors.items()}
