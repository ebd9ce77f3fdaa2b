"""Counter of bytes held and of their peak."""

from __future__ import annotations


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
