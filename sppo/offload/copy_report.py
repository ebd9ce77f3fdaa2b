"""What copies did in one step: bytes by class and direction, rates, and what compute waited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CopyReport:
    """One step; all measured."""

    out_bytes: Mapping[str, int] = field(default_factory=dict)
    """Sent away, by class."""
    back_bytes: Mapping[str, int] = field(default_factory=dict)
    """Brought back, by class."""
    out_s: float = 0.0
    """Seconds in which the slowest queue out was busy."""
    back_s: float = 0.0
    """Seconds in which the slowest queue back was busy."""
    exposed_s: float = 0.0
    """Compute waited for copies."""
    host_bytes: int = 0
    """Host memory set aside: all offloaded tensors, or those on their way to and from a disk."""
    ring_bytes: int = 0
    """Device memory set aside for what comes back."""
    disk_bytes: int = 0
    """Size of the file."""

    @property
    def total_out_bytes(self) -> int:
        """Sent away in all."""
        return sum(self.out_bytes.values())

    @property
    def out_bytes_per_s(self) -> float:
        """While the slowest queue out was busy; 0 if nothing was sent."""
        return self.total_out_bytes / self.out_s if self.out_s > 0 else 0.0

    @property
    def back_bytes_per_s(self) -> float:
        """While the slowest queue back was busy; 0 if nothing came back."""
        return sum(self.back_bytes.values()) / self.back_s if self.back_s > 0 else 0.0


def combined(reports: Sequence[CopyReport]) -> CopyReport:
    """What the stages of one rank did together: waits add up, queues ran side by side."""
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
