"""Shortfall: which memory a candidate lacks, on which stage, and what most of it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sppo.cost.candidate import Candidate
from sppo.cost.memory.stage_memory import StageMemory
from sppo.cost.memory.tier_memory import tier_buckets
from sppo.units import format_bytes


@dataclass(frozen=True, slots=True)
class Shortfall:
    """The pipeline rank that lacks most memory, and of what.

    Attributes:
        place: "device", "host" or "disk".
        rank: Which.
        bucket: The largest bucket there, without "_bytes".
        bucket_bytes: What it takes.
        needed_bytes: All buckets together.
        available_bytes: What there is.
    """

    place: Literal["device", "host", "disk"]
    rank: int
    bucket: str
    bucket_bytes: int
    needed_bytes: int
    available_bytes: int

    @property
    def short_bytes(self) -> int:
        """Bytes by which it does not fit."""
        return self.needed_bytes - self.available_bytes

    @property
    def reason(self) -> str:
        """Return why something does not fit, in one line."""
        return (
            f"rank {self.rank} needs {format_bytes(self.needed_bytes)} of {self.place} memory "
            f"and {format_bytes(self.available_bytes)} are there: short by "
            f"{format_bytes(self.short_bytes)}; most of it is {self.bucket.replace('_', ' ')} "
            f"({format_bytes(self.bucket_bytes)})"
        )


def find_shortfall(candidate: Candidate, memory: tuple[StageMemory, ...]) -> Shortfall | None:
    """Return where the ranks of a candidate lack most memory; None where it fits."""
    hardware = candidate.workload.hardware
    rooms: list[tuple[Literal["host", "disk"], int]] = [("disk", hardware.disk_bytes_per_device)]
    if hardware.device.kind != "cpu":  # its host memory is the device's
        rooms.append(("host", hardware.host_bytes_per_device))
    found = []
    for rank, held in enumerate(memory):
        device = held.device
        bucket = device.largest
        found.append(
            Shortfall(
                "device",
                rank,
                bucket.removesuffix("_bytes"),
                getattr(device, bucket),
                device.total_bytes,
                candidate.budget_bytes,
            )
        )
        for place, room in rooms:
            buckets = tier_buckets(held, place, activations=candidate.tier, state=candidate.state)
            bucket = max(buckets, key=lambda name: buckets[name])
            needed = sum(buckets.values())
            found.append(Shortfall(place, rank, bucket, buckets[bucket], needed, room))
    worst = max(found, key=lambda shortfall: shortfall.short_bytes)
    return worst if worst.short_bytes > 0 else None
