"""Ledger of GPU memory by storage, rounded as torch's caching allocator does."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tests.dry_run.streams import Runtime, Stream

ROUNDING_BYTES = 512
"""Multiple to which the caching allocator rounds every request up (``kMinBlockSize`` in torch's
``CUDACachingAllocator.cpp``)."""


class MemoryLedger:
    """Live storages of tensors, with their bytes on the GPU.

    Args:
        runtime: Runtime that sums the bytes and tracks their peak.
        made: Callback for a new storage on the GPU, with its key, bytes, and allocating stream.
        freed: Callback for a freed storage, with its key and allocating stream; the stream is None
            for host memory.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        made: Callable[[int, int, Stream], None],
        freed: Callable[[int, Stream | None], None],
    ) -> None:
        self._runtime, self._made, self._freed = runtime, made, freed
        self._live: dict[int, int] = {}
        self._page_locked: set[int] = set()

    def see(self, tensor: Tensor) -> None:
        """Add the storage of a tensor that an operation returned, if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        on_gpu = is_on_gpu(tensor)
        self._live[key] = rounded(storage.nbytes()) if on_gpu else 0
        self._runtime.use(self._live[key])
        stream = self._runtime.current if on_gpu else None
        if stream is not None:
            self._made(key, storage.nbytes(), stream)
        weakref.finalize(storage, self._forget, key, stream).atexit = False

    def page_lock(self, tensor: Tensor) -> Tensor:
        """Mark the host memory of ``tensor`` as page-locked, and return ``tensor``."""
        self._page_locked.add(storage_key(tensor))
        return tensor

    def is_page_locked(self, tensor: Tensor) -> bool:
        """Return whether the host memory of ``tensor`` is page-locked, so copies can overlap."""
        return storage_key(tensor) in self._page_locked

    def _forget(self, key: int, stream: Stream | None) -> None:
        self._runtime.use(-self._live.pop(key))
        self._page_locked.discard(key)
        self._freed(key, stream)


def rounded(size_bytes: int) -> int:
    """Return the bytes that the caching allocator uses for a request of ``size_bytes``."""
    return -(-size_bytes // ROUNDING_BYTES) * ROUNDING_BYTES


def storage_key(tensor: Tensor) -> int:
    """Return a key that tensors of the same storage share, unique while the storage lives."""
    return int(tensor.untyped_storage()._cdata)


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """Return the half-open range of bytes of its storage in which a tensor lies."""
    sizes, strides = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
    if 0 in sizes:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    begin, width = int(tensor.storage_offset()), int(tensor.element_size())
    return begin * width, (begin + last + 1) * width


def is_on_gpu(value: object) -> bool:
    """Return whether ``value`` is a fake tensor on the fake GPU."""
    # Tensor.device of a fake tensor is an operation, which the recorder would count.
    return isinstance(value, FakeTensor) and value.fake_device.type == "cuda"
