"""Saved tensors that stay on the device: kept where they are, or copied to a stack."""

from __future__ import annotations

from collections.abc import KeysView, Mapping, Sequence
from math import prod

from torch import Tensor

from sppo.activations.activation_layout import ActivationKey
from sppo.offload.arena import ALIGNMENT_BYTES, HostArena
from sppo.offload.held_bytes import HeldBytes


class RetainedTensors:
    """Tensors by key, kept where they are: in the memory of torch's allocator."""

    def __init__(self) -> None:
        self.held = HeldBytes()
        """Bytes of the tensors."""
        self._tensors: dict[ActivationKey, dict[str, Tensor]] = {}

    @property
    def keys(self) -> KeysView[ActivationKey]:
        """Keys that were put and not yet got."""
        return self._tensors.keys()

    def reserve(self, num_bytes: int) -> None:
        """Reserve memory for tensors of ``num_bytes``; these bring their own."""

    def put(self, key: ActivationKey, tensors: Mapping[str, Tensor]) -> None:
        """Keep ``tensors``; a view of a larger tensor does not keep its memory."""
        assert key not in self._tensors, f"{key} is saved already"
        self._tensors[key] = self._kept(tensors)
        self.held.add_tensors(self._tensors[key].values())

    def peek(self, key: ActivationKey, name: str) -> Tensor | None:
        """Return one tensor, which stays here; None if it is not saved."""
        return self._tensors[key].get(name)

    def get(self, key: ActivationKey, *, owned: bool) -> dict[str, Tensor]:
        """Remove and return the tensors of ``key``; the caller may keep them if ``owned``."""
        tensors = self._tensors.pop(key)
        self.held.remove_tensors(tensors.values())
        return tensors

    def free(self, key: ActivationKey) -> None:
        """Allow reuse of the memory of tensors that were got and are not owned."""

    def clear(self) -> None:
        """Drop all tensors."""
        self._tensors.clear()
        self.held.clear()

    def _kept(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: on_its_own(tensor) for name, tensor in tensors.items()}


class TensorStack(RetainedTensors):
    """Tensors by key, copied to a stack in a :class:`HostArena`: the last key is got first.

    Backward takes tensors in the reverse order of forward, so a stack pointer suffices to manage
    the memory. Putting copies each tensor once. Long-lived tensors thus stay out of the C heap,
    which they would fragment between short-lived ones: the resident set does not grow, and no pages
    are returned and faulted in again.

    Args:
        poison: Overwrite tensors with NaN when they are freed, so that a late reader gets NaN.
    """

    def __init__(self, *, poison: bool) -> None:
        super().__init__()
        self._poisons = poison
        self._lent: dict[ActivationKey, list[Tensor]] = {}
        self._arena: HostArena | None = None
        self._begins: list[int] = []
        self._end_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        """Reserve ``num_bytes``, the sum of the :func:`stacked_bytes` of all tensors.

        Raises:
            MemoryError: The machine lacks memory.
        """
        assert not self._begins, "a stack in use stays where it is"
        if num_bytes == 0 or (self._arena is not None and num_bytes <= self._arena.size_bytes):
            return
        self._arena = None  # free first: both may not fit
        self._arena = HostArena(num_bytes)

    def get(self, key: ActivationKey, *, owned: bool) -> dict[str, Tensor]:
        """Pop the tensors of ``key``, which was put last; copy them if ``owned``."""
        last = next(reversed(self._tensors))
        assert key == last, f"{key} is taken before {last}, which was saved later"
        tensors = super().get(key, owned=owned)
        self._end_bytes = self._begins.pop()
        if self._poisons:
            self._lent[key] = [*tensors.values()]
        return copied(tensors) if owned else tensors

    def free(self, key: ActivationKey) -> None:
        """Allow reuse of the memory of tensors that were got and are not owned."""
        for tensor in self._lent.pop(key, ()):
            tensor.fill_(float("nan"))

    def clear(self) -> None:
        """Pop everything."""
        super().clear()
        self._lent.clear()
        self._begins.clear()
        self._end_bytes = 0

    def _kept(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
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
