"""Report of the copies of one step: bytes by class and direction, rates, exposed copy time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CopyReport:
    """Bytes and seconds of one step, measured, and the memory reserved for copies."""

    out_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes copied out, by tensor class."""
    back_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes copied back, by tensor class."""
    out_s: float = 0.0
    """Seconds in which the slowest queue out was busy."""
    back_s: float = 0.0
    """Seconds in which the slowest queue back was busy."""
    exposed_s: float = 0.0
    """Seconds in which compute waited for copies."""
    host_bytes: int = 0
    """Host memory reserved: for all offloaded tensors, or for those under way to or from a disk."""
    ring_bytes: int = 0
    """Device memory reserved for blocks that come back."""
    disk_bytes: int = 0
    """Size of the file on the disk."""

    @property
    def total_out_bytes(self) -> int:
        """Bytes copied out, of all classes."""
        return sum(self.out_bytes.values())

    @property
    def out_bytes_per_s(self) -> float:
        """Rate of copies out while their slowest queue was busy; 0 if there were none."""
        return self.total_out_bytes / self.out_s if self.out_s > 0 else 0.0

    @property
    def back_bytes_per_s(self) -> float:
        """Rate of copies back while their slowest queue was busy; 0 if there were none."""
        return sum(self.back_bytes.values()) / self.back_s if self.back_s > 0 else 0.0


def combined(reports: Sequence[CopyReport]) -> CopyReport:
    """Return the report of all stages of one rank, whose waits add up and whose queues overlap."""
    if len(reports) == 1:
        return reports[0]
    out: Counter[str] = Counter()
    back: Counter[str] = Counter()
    for report in reports:
        out.update(report.out_bytes)
        back.update(report.back_bytes)
    return CopyReport(
        dict(out),
        dict(back),
        out_s=max((report.out_s for report in reports), default=0.0),
        back_s=max((report.back_s for report in reports), default=0.0),
        exposed_s=sum(report.exposed_s for report in reports),
        host_bytes=sum(report.host_bytes for report in reports),
        ring_bytes=sum(report.ring_bytes for report in reports),
        disk_bytes=sum(report.disk_bytes for report in reports),
    )
