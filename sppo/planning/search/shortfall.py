"""Shortfall: which memory a candidate lacks, on which stage, and what most of it is."""

from __future__ import annotations

from dataclasses import dataclass

from sppo.cost.candidate import Candidate
from sppo.cost.memory.stage_memory import StageMemory
from sppo.units import format_bytes

SAVED_IN_BACKGROUND = "checkpoint saved in the background"
"""Bucket of host memory behind a GPU, see :class:`sppo.cost.memory.stage_memory.StageMemory`."""


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

    place: str
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


def _tier_buckets(held: StageMemory) -> tuple[tuple[str, int], ...]:
    return (
        ("offloaded activations", held.tier_activations_bytes),
        ("optimizer states", held.host_optimizer_bytes),
        ("gradients", held.tier_gradients_bytes),
        ("weights", held.tier_weights_bytes),
    )


def find_shortfall(candidate: Candidate, memory: tuple[StageMemory, ...]) -> Shortfall | None:
    """Return where the ranks of a candidate lack most memory; None where it fits."""
    hardware = candidate.workload.hardware
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
        if hardware.node.host_memory_bytes > 0:
            place, needed, room = "host", held.host_bytes, hardware.host_bytes_per_device
            buckets = (*_tier_buckets(held), (SAVED_IN_BACKGROUND, held.background_save_bytes))
        else:
            place, needed, room = "disk", held.tier_bytes, hardware.disk_bytes_per_device
            buckets = _tier_buckets(held)
        bucket, size_bytes = max(buckets, key=lambda bucket: bucket[1])
        found.append(Shortfall(place, rank, bucket, size_bytes, needed, room))
    worst = max(found, key=lambda shortfall: shortfall.short_bytes)
    return worst if worst.short_bytes > 0 else None
