"""Report of the copies of offloaded tensors in one step: bytes, rates, exposed copy time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class CopyReport:
    """Measured bytes and seconds of the copies of one step, and the memory reserved for them."""

    out_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes copied out, by tensor class."""
    back_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes copied back, by tensor class."""
    out_s: float = 0.0
    """Busy seconds of the slowest queue out: to the host, or to the disk."""
    back_s: float = 0.0
    """Busy seconds of the slowest queue back: from the disk, or from the host."""
    exposed_s: float = 0.0
    """Seconds in which compute waited for copies."""
    host_bytes: int = 0
    """Host memory reserved: for all offloaded tensors, or with a disk for the staging slots, and
    for training state behind the device."""
    device_bytes: int = 0
    """Device memory reserved for blocks that return; see also :attr:`without_host`."""
    disk_bytes: int = 0
    """Size of the file on the disk."""

    @property
    def total_out_bytes(self) -> int:
        """Bytes copied out, over all classes."""
        return sum(self.out_bytes.values())

    @property
    def out_bytes_per_s(self) -> float:
        """Bytes copied out per busy second of the slowest queue; 0 if none were copied."""
        return self.total_out_bytes / self.out_s if self.out_s > 0 else 0.0

    @property
    def back_bytes_per_s(self) -> float:
        """Bytes copied back per busy second of the slowest queue; 0 if none were copied."""
        return sum(self.back_bytes.values()) / self.back_s if self.back_s > 0 else 0.0

    @property
    def without_host(self) -> CopyReport:
        """The report of a CPU, where slots of blocks that leave are device memory, too."""
        device_bytes = self.device_bytes + self.host_bytes
        return replace(self, device_bytes=device_bytes, host_bytes=0)
