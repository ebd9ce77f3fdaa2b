"""Memory of the ranks for people: groups of equal ranks, and a bar of letters.

Every bucket has a letter, so a bar reads the same with and without colour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from sppo.cost.memory.stage_memory import MemoryBuckets, StageMemory

FREE = "·"
BUDGET_LINE = "│"


@dataclass(frozen=True, slots=True)
class BucketLabel:
    """Name and letter of a bucket of :class:`sppo.cost.memory.stage_memory.MemoryBuckets` in plots.

    Attributes:
        field: Its field, with ``_bytes``.
        letter: In bars.
        label: Its name in tables.
    """

    field: str
    letter: str
    label: str

    def bytes_of(self, device: MemoryBuckets) -> int:
        """Return the bytes of the bucket."""
        return int(getattr(device, self.field))


BUCKETS = (
    BucketLabel("weights_bytes", "W", "weights"),
    BucketLabel("gradients_bytes", "G", "gradients"),
    BucketLabel("optimizer_bytes", "O", "optimizer states"),
    BucketLabel("kv_bytes", "K", "K and V"),
    BucketLabel("kv_gradients_bytes", "D", "dK and dV"),
    BucketLabel("activations_bytes", "A", "saved activations"),
    BucketLabel("copies_bytes", "C", "room for copies"),
    BucketLabel("loss_gradient_bytes", "L", "gradient of the loss"),
    BucketLabel("working_bytes", "R", "running layer"),
    BucketLabel("heap_bytes", "H", "C heap"),
    BucketLabel("communication_bytes", "M", "messages"),
    BucketLabel("growth_bytes", "P", "process growth"),
)
_NOT_SHOWN = "never_at_once_bytes"
"""Bucket that corrects the sum of the others, and is 0 in plans of runs."""
assert [bucket.field for bucket in BUCKETS] == [
    field.name for field in fields(MemoryBuckets) if field.name != _NOT_SHOWN
], "every bucket is shown, in its order"
_LABELS: Mapping[str, str] = {bucket.field: bucket.label for bucket in BUCKETS}


def bucket_text(name: str) -> str:
    """Label of a bucket, from its name with or without ``_bytes``; other names as they are."""
    return _LABELS.get(f"{name.removesuffix('_bytes')}_bytes", name.replace("_", " "))


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Neighbouring pipeline ranks with the same memory.

    Attributes:
        first: First of them.
        last: Last of them.
        memory: Of each.
    """

    first: int
    last: int
    memory: StageMemory

    @property
    def name(self) -> str:
        """Return ``rank 0`` or ``ranks 1-6``."""
        if self.first == self.last:
            return f"rank {self.first}"
        return f"ranks {self.first}-{self.last}"


def rank_groups(memory: Sequence[StageMemory]) -> tuple[RankGroup, ...]:
    """Neighbouring ranks with equal memory, together."""
    groups: list[RankGroup] = []
    for rank, held in enumerate(memory):
        if groups and groups[-1].memory == held:
            groups[-1] = RankGroup(groups[-1].first, rank, held)
        else:
            groups.append(RankGroup(rank, rank, held))
    return tuple(groups)


def shown_groups(groups: Sequence[RankGroup], *, most: int) -> tuple[RankGroup, ...]:
    """Return at most `most` groups, in order: the first, the last, and the fullest of the rest."""
    if len(groups) <= most:
        return tuple(groups)
    by_size = sorted(groups[1:-1], key=lambda g: g.memory.device.total_bytes, reverse=True)
    chosen = (groups[0], *by_size[: most - 2], groups[-1])
    return tuple(sorted(chosen, key=lambda group: group.first))


def memory_bar(device: MemoryBuckets, *, budget_bytes: int, scale_bytes: int, width: int) -> str:
    """Return one device's memory in letters, with a line where the budget ends.

    Args:
        device: its buckets.
        budget_bytes: what may be filled.
        scale_bytes: what the whole width stands for; at least the budget and the total.
        width: characters, the line not counted.
    """
    assert scale_bytes >= max(budget_bytes, 1), "the budget is on the bar"
    cells, filled = "", 0
    for bucket in BUCKETS:
        filled += bucket.bytes_of(device)
        cells += bucket.letter * (round(filled / scale_bytes * width) - len(cells))
    budget = round(budget_bytes / scale_bytes * width)
    cells += FREE * (budget - len(cells))
    return f"{cells[:budget]}{BUDGET_LINE}{cells[budget:]}"
