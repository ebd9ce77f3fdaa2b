"""Page-locking of already mapped host memory by the CUDA runtime.

``torch.cuda.cudart()`` has no ``cudaGetLastError``, and the runtime keeps an error until it is
queried: the next kernel launch would report the error of a failed page-lock as its own.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch
from torch import Tensor


def lock_pages(runtime: Any, memory: Tensor) -> None:
    """Page-lock all of ``memory``.

    Args:
        runtime: Result of ``torch.cuda.cudart()``.
        memory: Contiguous host tensor, which must stay mapped until it is unlocked.

    Raises:
        MemoryError: The machine lacks memory, or its limit on locked memory (``ulimit -l``) is too
            low.
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
    """Unlock memory that :func:`lock_pages` locked and that no copy uses any more."""
    failure = runtime.cudaHostUnregister(memory.data_ptr())
    if int(failure) != 0:
        forget_last_error()


def forget_last_error() -> None:
    """Clear the last error of the CUDA runtime in this thread, if the runtime is loaded."""
    version = torch.version.cuda
    if version is None:
        return
    name = f"libcudart.so.{version.split('.')[0]}"
    try:
        library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return  # linked statically into torch, whose runtime cannot be reached from here
    library.cudaGetLastError()
