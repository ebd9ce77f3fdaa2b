"""Tensors by global name to and from one directory, in the format of torch.distributed.checkpoint.

DCP knows tensors by name and shape, not by the layout that wrote them, so a checkpoint of one
process can be read by many. Its index file is a pickle: read checkpoints you trust, like any
``torch.save`` file.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
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
        RuntimeError: torch's file writer gave up, for which a full disk is the usual cause.
    """
    silence_single_process_warning()
    # One thread: DCP loses the errors of its other threads, and with them the tensors they held.
    writer = FileSystemWriter(directory, thread_count=1, sync_files=True)
    try:
        save(dict(state), storage_writer=writer, no_dist=True)
    except CheckpointException as error:
        raise _cause(error) from error


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


def _fault(name: str, tensor: Tensor, shapes: Mapping[str, torch.Size]) -> str | None:
    if name not in shapes:
        return f"{name} is missing"
    if shapes[name] != tensor.shape:
        return f"{name} is {list(shapes[name])}, not {list(tensor.shape)}"
    return None


def _cause(error: CheckpointException) -> BaseException:
    """What went wrong, freed from DCP's wrapping (which hides interrupts, too)."""
    return next((wrapped[0] for wrapped in error.failures.values()), error)
