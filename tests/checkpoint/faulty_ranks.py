"""Functions of ranks in tests of checkpoints in which one rank fails."""

import errno
import os
import shutil
import signal
from collections import namedtuple
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from sppo.checkpoint import checkpoint as checkpoint_module
from sppo.checkpoint import manifest as checkpoint_manifest
from sppo.checkpoint import tensors as checkpoint_tensors
from sppo.checkpoint.checkpoint import CheckpointError
from sppo.checkpoint.newest import InvalidCheckpointError
from sppo.checkpoint.state_block import StateBlock
from tests.checkpoint.resharding_ranks import (
    cut_state,
    load_and_compare,
    manager_of,
    names,
    tensor_of,
)
from tests.test_output_file import file_size_limit


def is_no_directory(path):
    return ".partial-" not in path.name and os.path.isdir(path)


def sum_and_lose(paths):
    """As if the files lay on a disk of this machine alone."""
    found = checkpoint_manifest.sum_files(paths)
    for path in paths:
        path.unlink()
    return found


class Unportable(RuntimeError):
    """Cannot be sent to another process."""

    def __init__(self):
        super().__init__("no pickle of this")
        self.lock = lambda: None


FAULTS = {
    "file size": lambda: file_size_limit(6000),
    "write": lambda: patch.object(
        checkpoint_tensors._WatchedFile, "write", side_effect=OSError(errno.EIO, "I/O error")
    ),
    "read back": lambda: patch.object(
        checkpoint_module, "sum_files", side_effect=OSError(errno.EIO, "I/O error")
    ),
    "publish": lambda: patch.object(
        checkpoint_module, "publish", side_effect=OSError(errno.ENOSPC, "No space left on device")
    ),
    "space": lambda: patch.object(
        shutil, "disk_usage", lambda path: namedtuple("usage", "total used free")(9, 7, 2)
    ),
    "not shared": lambda: patch.object(Path, "is_dir", is_no_directory),
    "not seen": lambda: patch.object(checkpoint_module, "sum_files", sum_and_lose),
    "interrupt": lambda: patch.object(
        checkpoint_module, "sum_files", side_effect=KeyboardInterrupt()
    ),
    "unportable write": lambda: patch.object(
        checkpoint_tensors._WatchedFile, "write", side_effect=Unportable()
    ),
    "unportable": lambda: patch.object(checkpoint_module, "sum_files", side_effect=Unportable()),
}


def save_with_fault(group, directory, fault, on, async_save):
    """Save steps 1 and 2, with a fault of one rank at 2, then 3; what was raised at 2."""
    manager = manager_of(group, directory, async_save=async_save)
    state = cut_state(group, "grid", step=1)
    manager.save(state, step=1, metadata={})
    manager.wait()
    raised = None
    with FAULTS[fault]() if dist.get_rank(group) == on else patch.dict({}):
        try:
            manager.save(cut_state(group, "grid", step=2), step=2, metadata={})
            manager.wait()
        except BaseException as error:
            raised = error
    dist.barrier(group)
    left = names(directory)
    load_and_compare(group, manager, "rows", step=1)
    manager.save(cut_state(group, "grid", step=3), step=3, metadata={})
    manager.wait()
    load_and_compare(group, manager, "grid", step=3)
    return {
        "type": type(raised).__name__,
        "text": str(raised),
        "errno": raised.errno if isinstance(raised, CheckpointError) else None,
        "left": left,
    }


def die_in_save(group, directory, on):
    """Save step 1, then rank ``on`` is killed having written part of its file of step 2."""
    manager = manager_of(group, directory)
    manager.save(cut_state(group, "rows", step=1), step=1, metadata={})
    real = checkpoint_tensors._WatchedFile.write
    calls = 0

    def write(self, data):
        nonlocal calls
        calls += 1
        if calls == 10:
            self.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, data)

    if dist.get_rank(group) == on:
        patch.object(checkpoint_tensors._WatchedFile, "write", write).start()
    manager.save(cut_state(group, "rows", step=2), step=2, metadata={})


def find(group, directory):
    """What ``latest_valid`` says."""
    try:
        found = manager_of(group, directory).latest_valid()
    except InvalidCheckpointError as error:
        return {"error": str(error)}
    return {"found": found and [str(found.path), found.step, found.metadata]}


def load_wrong(group, directory, fault):
    """Load where rank 1 alone expects something else or sees nothing; what was raised."""
    manager = manager_of(group, directory)
    found = manager.latest_valid()
    state = cut_state(group, "rows", step=1, make=lambda block: torch.full_like(block, -1))
    hidden = patch.dict({})
    if dist.get_rank(group) == 1:
        if fault == "missing":
            state["model.extra"] = torch.full((2,), -1.0)
        elif fault == "shape":
            state["model.layers.1.norm.weight"] = StateBlock(torch.full((1,), -1.0), (3,), (4,))
        else:
            hidden = patch.object(
                checkpoint_manifest, "_read_manifest", side_effect=FileNotFoundError()
            )
    with hidden:
        try:
            manager.load_into(found, state)
        except ValueError as error:
            unchanged = all((tensor_of(value) == -1).all() for value in state.values())
            return {"error": str(error), "unchanged": bool(unchanged)}
    return {}


def save_bad_layout(group, directory, fault):
    """Blocks that are no tiling; what was raised."""
    rank = dist.get_rank(group)
    offset, rows, shape, dtype = 2 * rank, 2, (6, 2), torch.float32
    if rank == 1:
        offset, rows, shape, dtype = {
            "gap": (4, rows, shape, dtype),  # as rank 2: rows 2 and 3 are nowhere
            "overlap": (1, rows, shape, dtype),
            "shape": (offset, rows, (7, 2), dtype),
            "size": (0, 3, shape, dtype),
            "dtype": (offset, rows, shape, torch.bfloat16),
        }[fault]
    block = StateBlock(torch.zeros(rows, 2, dtype=dtype), (offset, 0), shape)
    try:
        manager_of(group, directory).save({"model.w": block}, step=1, metadata={})
    except ValueError as error:
        return str(error)
    return ""
