"""Memory of a GPU as torch's caching allocator would hand it out, tensor by tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from sppo.dry_run.streams import Runtime, Stream

ROUNDING_BYTES = 512
"""Multiple to which the caching allocator rounds every request up (``kMinBlockSize`` in torch's
``CUDACachingAllocator.cpp``)."""


class MemoryLedger:
    """Storages that live now; of those on the GPU the bytes, and the most there were at once.

    Args:
        runtime: told what is used.
        made: called with the key and the bytes of a storage on the GPU, and the stream that asks.
        freed: called with a storage's key when it is freed, and the stream on which it was made;
            None where it is in host memory.
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
        """Take in the storage of a tensor that an operation gave back, if it is new."""
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
        """Take in that the host memory of ``tensor`` is page-locked; return it."""
        self._page_locked.add(storage_key(tensor))
        return tensor

    def is_page_locked(self, tensor: Tensor) -> bool:
        """Return whether copies from and to host memory run without the host."""
        return storage_key(tensor) in self._page_locked

    def _forget(self, key: int, stream: Stream | None) -> None:
        self._runtime.use(-self._live.pop(key))
        self._page_locked.discard(key)
        self._freed(key, stream)


def rounded(size_bytes: int) -> int:
    """Return what a request takes."""
    return -(-size_bytes // ROUNDING_BYTES) * ROUNDING_BYTES


def storage_key(tensor: Tensor) -> int:
    """Return what tensors in the same memory have in common, while one of them lives."""
    return int(tensor.untyped_storage()._cdata)


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """Return the half-open range of its storage's bytes that a tensor lies in."""
    sizes, strides = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
    if 0 in sizes:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    begin, width = int(tensor.storage_offset()), int(tensor.element_size())
    return begin * width, (begin + last + 1) * width


def is_on_gpu(value: object) -> bool:
    """Return whether ``value`` is a tensor that pretends to be on a GPU."""
    # Asking a fake tensor for its device is an operation, which the recorder would see.
    return isinstance(value, FakeTensor) and value.fake_device.type == "cuda"
