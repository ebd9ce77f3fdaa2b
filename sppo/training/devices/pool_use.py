"""Memory that tensors use in the pool of a device's allocator."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Memory that tensors use in the pool of the device's allocator."""

    used_bytes: int
    """Bytes used now."""
    used_peak_bytes: int
    """Peak of the bytes used since the device reset it."""
    resident_peak_bytes: int | None = None
    """Peak of the bytes that the pool has from the system, used or free; None if unknown."""
