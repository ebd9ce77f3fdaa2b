"""Counter of the bytes that are held at once, in all and by part."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


class HeldBytes:
    """Bytes held now, and the most that were held at once.

    Args:
        whole: counter of which this one counts a part; what is held here is held there too.
    """

    def __init__(self, whole: HeldBytes | None = None) -> None:
        self._whole = whole
        self.now = 0
        """Bytes held now."""
        self.peak = 0
        """Most bytes held at once since :meth:`reset_peak`."""

    def add(self, num_bytes: int) -> None:
        """Count ``num_bytes`` more; fewer where negative."""
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        if self._whole is not None:
            self._whole.add(num_bytes)

    def add_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Count the elements of ``tensors``."""
        self.add(total_bytes(tensors))

    def remove_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Stop counting the elements of ``tensors``."""
        self.add(-total_bytes(tensors))

    def clear(self) -> None:
        """Hold nothing any more."""
        self.add(-self.now)

    def reset_peak(self) -> None:
        """Count the peak anew from what is held now."""
        self.peak = self.now


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all elements of ``tensors``."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
