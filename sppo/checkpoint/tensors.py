"""Saving and loading of blocks of tensors in the format of torch.distributed.checkpoint (DCP).

DCP stores tensors by name and shape, independent of the layout of the ranks that wrote them, so any
number of ranks can read a checkpoint of any other number. The index file is a pickle: only read
checkpoints that you trust, as with any ``torch.save`` file.
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
from sppo.checkpoint.state_block import Blocks, whole
from sppo.parallel.host_collectives import HostCollectives, portable
from sppo.parallel.job.peer_errors import peer_errors

BlockKey = tuple[str, tuple[int, ...]]
"""(name, offsets) of a block, equal for all replicas of the block."""

_NAMES_SHOWN = 5


def block_bytes(state: Blocks) -> dict[BlockKey, int]:
    """Return an upper bound on the bytes that each block takes on the disk."""
    per_block = 4096  # torch.save's archive around each tensor, and its entry in the index
    return {
        (name, block.offsets): block.tensor.numel() * block.tensor.element_size() + per_block
        for name, blocks in state.items()
        for block in blocks
        if not block.is_vacant
    }


def save_tensors(state: Blocks, *, directory: Path, ranks: HostCollectives) -> list[Path]:
    """Write the ``state`` of all ranks and its index into ``directory``. Collective.

    Every file is fsynced.

    Returns:
        Files that this rank wrote.

    Raises:
        OSError: On all ranks: a disk is full, or failed.
        PeerLostError: Another rank has ended.
    """
    silence_single_process_warning()
    writer = _Writer(directory, alone=ranks.group is None)
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
        rank = min(error.failures)
        raise ranks.of_rank(error.failures[rank][0], rank) from error
    return writer.files.written


def check_fits(directory: Path, into: Blocks) -> None:
    """Raise ValueError if a checkpoint cannot fill the blocks of ``into``.

    Raises:
        ValueError: The checkpoint lacks tensors, or has them in other shapes; names them.
    """
    shapes = saved_shapes(directory)
    faults = [
        fault
        for name, blocks in into.items()
        if blocks and (fault := _fault(name, blocks[0].global_shape, shapes))
    ]
    if faults:
        more = len(faults) - _NAMES_SHOWN
        shown = "; ".join(faults[:_NAMES_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(f"checkpoint {directory} is of another model: {shown}")


def load_tensors(directory: Path, *, into: Blocks) -> None:
    """Fill the blocks of ``into``, of any device and floating-point dtype, in place.

    Not collective: every rank reads the parts it needs. The caller has called :func:`check_fits`.
    """
    silence_single_process_warning()
    reader = FileSystemReader(directory)
    try:
        load(dict(into), storage_reader=reader, planner=BlockLoadPlanner(), no_dist=True)
    except CheckpointException as error:
        raise _cause(error) from error


def read_tensors(directory: Path, *, names: Iterable[str]) -> dict[str, Tensor]:
    """Read whole tensors by name, in fp32 on the CPU; other tensors are not read."""
    shapes = saved_shapes(directory)
    tensors = {name: torch.empty(shapes[name], dtype=torch.float32) for name in names}
    load_tensors(directory, into={name: [whole(tensor)] for name, tensor in tensors.items()})
    return tensors


def saved_shapes(directory: Path) -> dict[str, torch.Size]:
    """Return the global shape of every tensor in ``directory``; reads only the index."""
    index = FileSystemReader(directory).read_metadata()
    return {
        name: entry.size
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def silence_single_process_warning() -> None:
    """Silence DCP's warning that a single process saves, which is intended here."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


class _Writer(FileSystemWriter):
    """DCP writer that raises the system's own error, which DCP sends to the other ranks."""

    def __init__(self, directory: Path, *, alone: bool) -> None:
        # One thread: DCP loses errors of further threads, and with them the tensors they held.
        # No copies ahead: they would be page-locked and kept until the file is complete. They also
        # wait for the GPU, if there is one, even if no tensor is on it: a background save would
        # wait for training, and on the first GPU of the machine.
        super().__init__(directory, thread_count=1, sync_files=True, per_thread_copy_ahead=0)
        self.fs = self.files = _Files(alone=alone)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's blocks into one file; no file if replicas write all of them."""
        if not plan.items:
            nothing: Future[list[WriteResult]] = Future()
            nothing.set_result([])
            return nothing
        with self.files.own_words():
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index; called on rank 0."""
        with self.files.own_words():
            super().finish(metadata, results)


class _Files(FileSystem):
    """File system of DCP that keeps the system's error, which torch's writer would obscure."""

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self.error: OSError | None = None
        self.written: list[Path] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open ``path`` as FileSystem does, and keep the first error of its writes."""
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
        """Raise the system's error, if one was kept, instead of the error in the context.

        The error raised can always be pickled.
        """
        try:
            yield
        except Exception as error:
            found = portable(self.error or error)
            if found is None or found is error:
                raise
            raise found from error

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file as FileSystem does, also in :attr:`written`."""
        super().rename(path, new_path)
        self.written = [Path(new_path) if old == Path(path) else old for old in self.written]

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Raise OSError if rank 0's directory does not exist here, instead of creating another."""
        if not Path(path).is_dir():
            maker = "just made" if self._alone else "which rank 0 has made"
            why = why_absent(alone=self._alone)
            raise OSError(errno.ENOENT, f"{path}, {maker}, is not here; {why}")


class _WatchedFile:
    """Wrapper of a file that is written, with the methods that torch calls."""

    def __init__(self, stream: Any, files: _Files) -> None:
        self._stream, self._files = stream, files
        self.flush, self.close = stream.flush, stream.close
        self.fileno, self.tell = stream.fileno, stream.tell

    def write(self, data: Any) -> int:
        """Write ``data`` to the wrapped file, and return the bytes written; keeps an OSError."""
        try:
            return int(self._stream.write(data))
        except OSError as error:
            self._files.error = self._files.error or error
            raise


def _fault(name: str, shape: tuple[int, ...], shapes: Mapping[str, torch.Size]) -> str | None:
    if name not in shapes:
        return f"{name} is missing"
    if shapes[name] != shape:
        return f"{name} is {list(shapes[name])}, not {list(shape)}"
    return None


def _cause(error: CheckpointException) -> BaseException:
    """Return the first error that DCP wrapped, which may be an interrupt."""
    return next((wrapped[0] for wrapped in error.failures.values()), error)
