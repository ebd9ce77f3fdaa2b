"""Stack of tensors in one mapping of host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from torch import Tensor

from sppo.offload.arena import ALIGNMENT_BYTES, HostArena


class TensorStack:
    """Stack of tensors in a :class:`HostArena`.

    Backward takes tensors in the reverse order of forward, so a stack pointer suffices to manage
    the memory. Pushing copies each tensor once. Long-lived tensors thus stay out of the C heap,
    which they would fragment between short-lived ones: the resident set does not grow, and no pages
    are returned and faulted in again.
    """

    def __init__(self) -> None:
        self._arena: HostArena | None = None
        self._begins: list[int] = []
        self._end_bytes = 0

    def reserve(self, capacity_bytes: int) -> None:
        """Reserve ``capacity_bytes``, the sum of the :func:`stacked_bytes` of all tensors.

        Raises:
            MemoryError: The machine lacks memory.
        """
        assert not self._begins, "a stack in use stays where it is"
        if capacity_bytes == 0 or (
            self._arena is not None and capacity_bytes <= self._arena.size_bytes
        ):
            return
        self._arena = None  # free first: both may not fit
        self._arena = HostArena(capacity_bytes)

    def push(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy ``tensors`` onto the stack, and return the copies."""
        self._begins.append(self._end_bytes)
        copies = {}
        for name, tensor in tensors.items():
            assert self._arena is not None, "reserve() comes before push()"
            copies[name] = self._arena.tensor(self._end_bytes, tensor.shape, tensor.dtype)
            copies[name].copy_(tensor)
            self._end_bytes += stacked_bytes(tensor.shape, tensor.element_size())
        return copies

    def pop(self) -> None:
        """Let the next push overwrite what was pushed last."""
        self._end_bytes = self._begins.pop()

    def clear(self) -> None:
        """Pop everything."""
        self._begins.clear()
        self._end_bytes = 0


def stacked_bytes(shape: Sequence[int], element_bytes: int) -> int:
    """Return the bytes of a tensor on the stack: its size, rounded up to the alignment."""
    return -(-prod(shape) * element_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
