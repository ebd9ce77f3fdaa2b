"""Saved tensors that stay on the device: kept where they are, or copied to a stack."""

from __future__ import annotations

from collections.abc import KeysView, Mapping, Sequence
from math import prod

from torch import Tensor

from sppo.activations.activation_layout import ActivationKey
from sppo.offload.arena import ALIGNMENT_BYTES, HostArena


class HeldBytes:
    """Counter of the bytes held now and of their peak."""

    def __init__(self) -> None:
        self.now = 0
        """Bytes held now."""
        self.peak = 0
        """Peak of the bytes held since :meth:`reset_peak`."""

    def add(self, num_bytes: int) -> None:
        """Add ``num_bytes``, which may be negative."""
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def reset_peak(self) -> None:
        """Reset the peak to the bytes held now."""
        self.peak = self.now


class RetainedTensors:
    """Tensors by key: kept in the memory of torch's allocator, or on a stack.

    Backward takes tensors in the reverse order of forward, so a stack pointer suffices to manage
    the memory of a stack, a :class:`HostArena`. Putting copies each tensor once. Long-lived tensors
    thus stay out of the C heap, which they would fragment between short-lived ones: the resident
    set does not grow, and no pages are returned and faulted in again.

    Args:
        in_stack: Copy tensors onto a stack; the key that was put last is got first.
        poison: Overwrite tensors on the stack with NaN when they are freed, so that a late reader
            gets NaN.
    """

    def __init__(self, *, in_stack: bool = False, poison: bool = False) -> None:
        self.held = HeldBytes()
        """Bytes of the tensors; the owner of the store adds those of its own."""
        self._in_stack, self._poisons = in_stack, poison
        self._tensors: dict[ActivationKey, dict[str, Tensor]] = {}
        self._lent: dict[ActivationKey, list[Tensor]] = {}
        self._arena: HostArena | None = None
        self._begins: list[int] = []
        self._end_bytes = 0

    @property
    def keys(self) -> KeysView[ActivationKey]:
        """Keys that were put and not yet got."""
        return self._tensors.keys()

    def reserve(self, num_bytes: int) -> None:
        """Reserve the stack, if there is one, between steps.

        Args:
            num_bytes: Sum of the :func:`stacked_bytes` of all tensors.

        Raises:
            MemoryError: The machine lacks memory.
        """
        assert not self._begins, "a stack in use stays where it is"
        if not self._in_stack or num_bytes == 0:
            return
        if self._arena is None or num_bytes > self._arena.size_bytes:
            self._arena = None  # free first: both may not fit
            self._arena = HostArena(num_bytes)

    def put(self, key: ActivationKey, tensors: Mapping[str, Tensor]) -> None:
        """Keep ``tensors``; a view of a larger tensor does not keep the memory of that tensor."""
        assert key not in self._tensors, f"{key} is saved already"
        if self._in_stack:
            kept = self._stacked(tensors)
        else:
            kept = {name: on_its_own(tensor) for name, tensor in tensors.items()}
        self._tensors[key] = kept
        self.held.add(sum(tensor.nbytes for tensor in kept.values()))

    def peek(self, key: ActivationKey, name: str) -> Tensor | None:
        """Return one tensor, which stays here; None if it is not saved."""
        return self._tensors[key].get(name)

    def get(self, key: ActivationKey, *, owned: bool) -> dict[str, Tensor]:
        """Remove and return the tensors of ``key``; the caller may keep them if ``owned``."""
        if self._in_stack:
            last = next(reversed(self._tensors))
            assert key == last, f"{key} is taken before {last}, which was saved later"
            self._end_bytes = self._begins.pop()
        tensors = self._tensors.pop(key)
        self.held.add(-sum(tensor.nbytes for tensor in tensors.values()))
        if self._poisons:
            self._lent[key] = [*tensors.values()]
        return copied(tensors) if owned and self._in_stack else tensors

    def free(self, key: ActivationKey) -> None:
        """Allow reuse of the memory of tensors that were got and are not owned."""
        for tensor in self._lent.pop(key, ()):
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)

    def close(self) -> None:
        """Drop all tensors and the stack, which the next :meth:`reserve` allocates again."""
        self._tensors.clear()
        self._lent.clear()
        self._arena = None

    def _stacked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy ``tensors`` onto the stack, and return the copies."""
        self._begins.append(self._end_bytes)
        copies = {}
        for name, tensor in tensors.items():
            assert self._arena is not None, "reserve() comes before put()"
            copies[name] = self._arena.tensor(self._end_bytes, tensor.shape, tensor.dtype)
            copies[name].copy_(tensor)
            self._end_bytes += stacked_bytes(tensor.shape, tensor.element_size())
        return copies


def stacked_bytes(shape: Sequence[int], element_bytes: int) -> int:
    """Return the bytes of a tensor on the stack: its size, rounded up to the alignment."""
    return -(-prod(shape) * element_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def on_its_own(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a copy if it is a view that keeps a larger storage alive."""
    size = tensor.numel() * tensor.element_size()
    return tensor if tensor.untyped_storage().nbytes() == size else tensor.clone()


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of ``tensors``."""
    return {name: tensor.clone() for name, tensor in tensors.items()}
