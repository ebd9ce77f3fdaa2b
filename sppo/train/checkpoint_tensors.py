"""Tensors by global name to and from one directory, in the format of torch.distributed.checkpoint.

DCP knows tensors by name and shape, not by the layout that wrote them, so a checkpoint of one
process can be read by many. Its index file is a pickle: read checkpoints you trust, like any
``torch.save`` file.
"""

from __future__ import annotations

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
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

_NAMES_SHOWN = 5


def state_bytes(state: Mapping[str, Tensor]) -> int:
    """Bytes that :func:`save_tensors` takes on the disk, a little above the truth."""
    per_tensor = 4096  # torch.save's archive around each tensor, and its entry in the index
    data = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    return data + per_tensor * len(state)


def save_tensors(state: Mapping[str, Tensor], *, directory: Path) -> None:
    """Write ``state`` and its index into ``directory``, every file fsynced.

    Raises:
        OSError: the disk is full, or another fault of it.
    """
    silence_single_process_warning()
    # One thread: DCP loses the errors of its other threads, and with them the tensors they held.
    writer = FileSystemWriter(directory, thread_count=1, sync_files=True)
    files = _Files()
    writer.fs = files
    try:
        save(dict(state), storage_writer=writer, no_dist=True)
    except CheckpointException as error:
        raise files.error or _cause(error) from error


def load_tensors(directory: Path, *, into: Mapping[str, Tensor]) -> None:
    """Fill the tensors of ``into`` in place, whatever their device and floating dtype.

    Raises:
        ValueError: tensors that the checkpoint lacks or holds in another shape, by name; nothing
            was changed.
    """
    shapes = saved_shapes(directory)
    faults = [fault for name in into if (fault := _fault(name, into[name], shapes))]
    if faults:
        more = len(faults) - _NAMES_SHOWN
        shown = "; ".join(faults[:_NAMES_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(f"checkpoint {directory} is of another model: {shown}")
    silence_single_process_warning()
    try:
        load(dict(into), storage_reader=FileSystemReader(directory), no_dist=True)
    except CheckpointException as error:
        raise _cause(error) from error


def read_tensors(directory: Path, *, names: Iterable[str]) -> dict[str, Tensor]:
    """The named tensors in fp32 on the CPU, reading no others."""
    shapes = saved_shapes(directory)
    tensors = {name: torch.empty(shapes[name], dtype=torch.float32) for name in names}
    load_tensors(directory, into=tensors)
    return tensors


def saved_shapes(directory: Path) -> dict[str, torch.Size]:
    """Shape of every tensor in ``directory``, from the index alone."""
    index = FileSystemReader(directory).read_metadata()
    return {
        name: entry.size
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def silence_single_process_warning() -> None:
    """Drop DCP's warning that one process saves alone: here that is no accident."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


class _Files(FileSystem):
    """Remembers the system's error, which torch's archive writer turns into a riddle."""

    def __init__(self) -> None:
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open ``path`` as FileSystem does, and watch its writes."""
        try:
            with super().create_stream(path, mode) as stream:
                yield cast(io.IOBase, _WatchedFile(stream, self)) if "w" in mode else stream
        except OSError as error:
            self.error = self.error or error
            raise


class _WatchedFile:
    """A file to write into; only what torch calls."""

    def __init__(self, stream: Any, files: _Files) -> None:
        self._stream, self._files = stream, files
        self.flush, self.close = stream.flush, stream.close
        self.fileno, self.tell = stream.fileno, stream.tell

    def write(self, data: Any) -> int:
        """As the file's own."""
        try:
            return int(self._stream.write(data))
        except OSError as error:
            self._files.error = self._files.error or error
            raise


def _fault(name: str, tensor: Tensor, shapes: Mapping[str, torch.Size]) -> str | None:
    if name not in shapes:
        return f"{name} is missing"
    if shapes[name] != tensor.shape:
        return f"{name} is {list(shapes[name])}, not {list(tensor.shape)}"
    return None


def _cause(error: CheckpointException) -> BaseException:
    """What went wrong, freed from DCP's wrapping (which hides interrupts, too)."""
    return next((wrapped[0] for wrapped in error.failures.values()), error)
