"""Shortfall of a candidate: which memory it lacks, on which rank, and the largest bucket there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sppo.cost.candidate import Candidate
from sppo.cost.memory.stage_memory import StageMemory, tier_buckets
from sppo.units import format_bytes


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Memory that the pipeline rank with the largest deficit lacks, or a lower bound of it.

    Attributes:
        place: Kind of memory: "device", "host" or "disk".
        rank: Pipeline rank.
        bucket: Name of the largest memory bucket in `place`, without "_bytes".
        bucket_bytes: Bytes of the largest bucket.
        needed_bytes: Bytes of all buckets together.
        available_bytes: Bytes available for one device.
        at_least: Whether all figures are those of a lower bound: of the memory that every placement
            of activations needs, without saved activations.
    """

    place: Literal["device", "host", "disk"]
    rank: int
    bucket: str
    bucket_bytes: int
    needed_bytes: int
    available_bytes: int
    at_least: bool = False

    @property
    def short_bytes(self) -> int:
        """Missing bytes."""
        return self.needed_bytes - self.available_bytes

    @property
    def reason(self) -> str:
        """Explanation of the shortfall, in one line."""
        return f"rank {self.rank} needs {self.figures}"

    @property
    def figures(self) -> str:
        """What is needed, what is there, what is missing, and what most of it is."""
        bound, beside = "", ""
        if self.at_least:
            bound, beside = "at least ", ", without saved activations,"
        return (
            f"{bound}{format_bytes(self.needed_bytes)} of {self.place} memory{beside} and "
            f"{format_bytes(self.available_bytes)} are there: short by "
            f"{bound}{format_bytes(self.short_bytes)}; most of it is "
            f"{self.bucket.replace('_', ' ')} ({format_bytes(self.bucket_bytes)})"
        )


def find_shortfall(candidate: Candidate, memory: tuple[StageMemory, ...]) -> Shortfall | None:
    """Return the largest shortfall over all ranks and kinds of memory; None if all fit."""
    hardware = candidate.workload.hardware
    rooms: list[tuple[Literal["host", "disk"], int]] = [("disk", hardware.disk_bytes_per_device)]
    if hardware.device.kind != "cpu":  # the host memory of a CPU is its device memory
        rooms.append(("host", hardware.host_bytes_per_device))
    first_ranks: dict[StageMemory, int] = {}  # In long pipelines most ranks are equal.
    for rank, held in enumerate(memory):
        first_ranks.setdefault(held, rank)
    found = []
    for held, rank in first_ranks.items():
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
