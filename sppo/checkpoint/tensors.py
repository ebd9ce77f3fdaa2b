"""Blocks of tensors to and from one directory, in the format of torch.distributed.checkpoint.

DCP knows tensors by name and shape, not by the layout that wrote them, so a checkpoint of any
number of ranks can be read by any other. Its index file is a pickle: read checkpoints you trust,
like any ``torch.save`` file.
"""

from __future__ import annotations

import errno
import io
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from sppo.checkpoint.dcp_planners import BlockLoadPlanner, BlockSavePlanner
from sppo.checkpoint.manifest import why_absent
from sppo.checkpoint.ranks import CheckpointRanks, portable
from sppo.checkpoint.state_block import StateBlock, whole
from sppo.parallel.job.peer_errors import peer_errors

BlockKey = tuple[str, tuple[int, ...]]
"""Name and offsets: what replicas have in common."""

_NAMES_SHOWN = 5
_AHEAD_BYTES = 10_000_000
"""Bytes of tensors on a GPU that are copied to the CPU while others are written."""


def block_bytes(state: Mapping[str, StateBlock]) -> dict[BlockKey, int]:
    """Bytes that each block takes on the disk, a little above the truth."""
    per_block = 4096  # torch.save's archive around each tensor, and its entry in the index
    return {
        (name, block.offsets): block.tensor.numel() * block.tensor.element_size() + per_block
        for name, block in state.items()
        if not block.is_vacant
    }


def save_tensors(
    state: Mapping[str, StateBlock], *, directory: Path, ranks: CheckpointRanks
) -> list[Path]:
    """Write all ranks' ``state`` and its index into ``directory``, every file fsynced. Collective.

    Returns:
        The files that this rank wrote.

    Raises:
        OSError: on all ranks, that a disk is full, or another fault of it.
        PeerLostError: another rank has ended.
    """
    silence_single_process_warning()
    on_cpu = all(block.tensor.device.type == "cpu" for block in state.values())
    writer = _Writer(directory, alone=ranks.group is None, on_cpu=on_cpu)
    try:
        with peer_errors("writing a checkpoint together with the other ranks"):
            save(
                dict(state),
                storage_writer=writer,
                planner=BlockSavePlanner(),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
    except CheckpointException as error:
        raise ranks.failure({i: wrapped[0] for i, wrapped in error.failures.items()}) from error
    return writer.files.written


def check_fits(directory: Path, into: Mapping[str, StateBlock]) -> None:
    """Refuse a checkpoint that cannot fill ``into``.

    Raises:
        ValueError: tensors that the checkpoint lacks or holds in another shape, by name.
    """
    shapes = saved_shapes(directory)
    faults = [fault for name in into if (fault := _fault(name, into[name], shapes))]
    if faults:
        more = len(faults) - _NAMES_SHOWN
        shown = "; ".join(faults[:_NAMES_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(f"checkpoint {directory} is of another model: {shown}")


def load_tensors(directory: Path, *, into: Mapping[str, StateBlock]) -> None:
    """Fill the blocks of ``into`` in place, whatever their device and floating dtype.

    Not collective: every rank reads what it needs. :func:`check_fits` comes before.
    """
    silence_single_process_warning()
    reader = FileSystemReader(directory)
    try:
        load(dict(into), storage_reader=reader, planner=BlockLoadPlanner(), no_dist=True)
    except CheckpointException as error:
        raise _cause(error) from error


def read_tensors(directory: Path, *, names: Iterable[str]) -> dict[str, Tensor]:
    """The named tensors, whole, in fp32 on the CPU, reading no others."""
    shapes = saved_shapes(directory)
    tensors = {name: torch.empty(shapes[name], dtype=torch.float32) for name in names}
    load_tensors(directory, into={name: whole(tensor) for name, tensor in tensors.items()})
    return tensors


def saved_shapes(directory: Path) -> dict[str, torch.Size]:
    """Shape of every whole tensor in ``directory``, from the index alone."""
    index = FileSystemReader(directory).read_metadata()
    return {
        name: entry.size
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def silence_single_process_warning() -> None:
    """Drop DCP's warning that one process saves alone: here that is no accident."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


class _Writer(FileSystemWriter):
    """Fails with the system's own message, which DCP then carries to the other ranks."""

    def __init__(self, directory: Path, *, alone: bool, on_cpu: bool) -> None:
        # One thread: DCP loses the errors of its others, and with them the tensors they held.
        # Copying ahead waits for the GPU, if there is one, also where nothing is on it: a
        # background save would wait for training, and on the first GPU of the machine.
        super().__init__(
            directory,
            thread_count=1,
            sync_files=True,
            per_thread_copy_ahead=0 if on_cpu else _AHEAD_BYTES,
        )
        self.fs = self.files = _Files(alone=alone)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's blocks into one file; into none where replicas write them all."""
        if not plan.items:
            nothing: Future[list[WriteResult]] = Future()
            nothing.set_result([])
            return nothing
        with self.files.own_words():
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, on rank 0."""
        with self.files.own_words():
            super().finish(metadata, results)


class _Files(FileSystem):
    """Remembers the system's error, which torch's archive writer turns into a riddle."""

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self.error: OSError | None = None
        self.written: list[Path] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open ``path`` as FileSystem does, and watch its writes."""
        if "w" in mode:
            self.written.append(Path(path))
        try:
            with super().create_stream(path, mode) as stream:
                yield cast(io.IOBase, _WatchedFile(stream, self)) if "w" in mode else stream
        except OSError as error:
            self.error = self.error or error
            raise

    @contextmanager
    def own_words(self) -> Iterator[None]:
        """Raise the system's error in place of what became of it; in any case one that travels."""
        try:
            yield
        except Exception as error:
            found = portable(self.error or error)
            if found is None or found is error:
                raise
            raise found from error

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file as FileSystem does."""
        super().rename(path, new_path)
        self.written = [Path(new_path) if old == Path(path) else old for old in self.written]

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Instead of making a second one elsewhere, look for the directory that rank 0 made."""
        if not Path(path).is_dir():
            maker = "just made" if self._alone else "which rank 0 has made"
            why = why_absent(alone=self._alone)
            raise OSError(errno.ENOENT, f"{path}, {maker}, is not here; {why}")


class _WatchedFile:
    """A file to write into; only what torch calls."""

    def __init__(self, stream: Any, files: _Files) -> None:
        self._stream, self._files = stream, files
        self.flush, self.close = stream.flush, stream.close
        self.fileno, self.tell = stream.fileno, stream.tell

    def write(self, data: Any) -> int:
        """Write as the wrapped file does, and count what was written."""
        try:
            return int(self._stream.write(data))
        except OSError as error:
            self._files.error = self._files.error or error
            raise


def _fault(name: str, block: StateBlock, shapes: Mapping[str, torch.Size]) -> str | None:
    if name not in shapes:
        return f"{name} is missing"
    if shapes[name] != block.global_shape:
        return f"{name} is {list(shapes[name])}, not {list(block.global_shape)}"
    return None


def _cause(error: CheckpointException) -> BaseException:
    """Return the error itself, freed from DCP's wrapping (which hides interrupts, too)."""
    return next((wrapped[0] for wrapped in error.failures.values()), error)
