"""Page-locking of host memory that is mapped already, by the CUDA runtime.

What ``torch.cuda.cudart()`` gives has no ``cudaGetLastError``, and the runtime remembers an error
until it is asked: the next kernel launch would report it as its own.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch
from torch import Tensor


def lock_pages(runtime: Any, memory: Tensor) -> None:
    """Page-lock all of ``memory``, a contiguous tensor of the host.

    Args:
        runtime: what ``torch.cuda.cudart()`` returns.
        memory: stays mapped until it is unlocked.

    Raises:
        MemoryError: the machine, or its limit on locked memory (``ulimit -l``), does not allow
            that much.
    """
    failure = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(failure) == 0:
        return
    why = runtime.cudaGetErrorString(failure)
    forget_last_error()
    raise MemoryError(
        f"CUDA refuses to page-lock {memory.nbytes} bytes of host memory ({why}); raise ulimit -l, "
        "or offload less (activations.offload_ratio)"
    )


def unlock_pages(runtime: Any, memory: Tensor) -> None:
    """Unlock what :func:`lock_pages` locked and no copy uses any more."""
    failure = runtime.cudaHostUnregister(memory.data_ptr())
    if int(failure) != 0:
        forget_last_error()


def forget_last_error() -> None:
    """Clear the error that the CUDA runtime of this thread remembers, where it is loaded."""
    version = torch.version.cuda
    if version is None:
        return
    name = f"libcudart.so.{version.split('.')[0]}"
    try:
        library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return  # linked into torch itself, which then has no name for others to ask by
    library.cudaGetLastError()
