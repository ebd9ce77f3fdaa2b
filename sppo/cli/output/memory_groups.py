"""Memory of ranks in text form: groups of equal ranks, and bars of letters.

Every bucket has a letter, so that a bar can be read without colour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from sppo.cost.memory.stage_memory import MemoryBuckets, StageMemory

FREE = "·"
BUDGET_LINE = "│"


@dataclass(frozen=True, slots=True)
class BucketLabel:
    """Letter and name of a field of :class:`sppo.cost.memory.stage_memory.MemoryBuckets` in text.

    Attributes:
        field: Name of the field of MemoryBuckets, including ``_bytes``.
        letter: Letter of the bucket in bars.
        label: Name of the bucket in tables.
    """

    field: str
    letter: str
    label: str

    def bytes_of(self, device: MemoryBuckets) -> int:
        """Return the bytes of this bucket in `device`."""
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
    BucketLabel("communicators_bytes", "N", "NCCL communicators"),
)
_NOT_SHOWN = "never_at_once_bytes"
"""Field that corrects the sum of the other buckets, and is 0 in plans of runs."""
assert [bucket.field for bucket in BUCKETS] == [
    field.name for field in fields(MemoryBuckets) if field.name != _NOT_SHOWN
], "every bucket is shown, in its order"
_LABELS: Mapping[str, str] = {bucket.field: bucket.label for bucket in BUCKETS}


def bucket_text(name: str) -> str:
    """Return the label of a bucket, named with or without ``_bytes``; unknown names in words."""
    return _LABELS.get(f"{name.removesuffix('_bytes')}_bytes", name.replace("_", " "))


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Neighbouring pipeline ranks with equal memory.

    Attributes:
        first: First rank of the group.
        last: Last rank of the group.
        memory: Memory of each rank of the group.
    """

    first: int
    last: int
    memory: StageMemory

    @property
    def name(self) -> str:
        """Name of the group: ``rank 0`` or ``ranks 1-6``."""
        if self.first == self.last:
            return f"rank {self.first}"
        return f"ranks {self.first}-{self.last}"


def rank_groups(memory: Sequence[StageMemory]) -> tuple[RankGroup, ...]:
    """Group neighbouring ranks with equal memory."""
    groups: list[RankGroup] = []
    for rank, held in enumerate(memory):
        if groups and groups[-1].memory == held:
            groups[-1] = RankGroup(groups[-1].first, rank, held)
        else:
            groups.append(RankGroup(rank, rank, held))
    return tuple(groups)


def shown_groups(groups: Sequence[RankGroup], *, most: int) -> tuple[RankGroup, ...]:
    """Return at most `most` groups in order: the first, the last, and the fullest others."""
    if len(groups) <= most:
        return tuple(groups)
    by_size = sorted(groups[1:-1], key=lambda g: g.memory.device.total_bytes, reverse=True)
    chosen = (groups[0], *by_size[: most - 2], groups[-1])
    return tuple(sorted(chosen, key=lambda group: group.first))


def memory_bar(device: MemoryBuckets, *, budget_bytes: int, scale_bytes: int, width: int) -> str:
    """Return the memory of one device as a bar of letters, with a line where the budget ends.

    Args:
        device: Memory of the device by bucket.
        budget_bytes: Memory that may be used.
        scale_bytes: Bytes that the whole width stands for; at least the budget and the total.
        width: Characters of the bar, without the line.
    """
    assert scale_bytes >= max(budget_bytes, 1), "the budget is on the bar"
    cells, filled = "", 0
    for bucket in BUCKETS:
        filled += bucket.bytes_of(device)
        cells += bucket.letter * (round(filled / scale_bytes * width) - len(cells))
    budget = round(budget_bytes / scale_bytes * width)
    cells += FREE * (budget - len(cells))
    return f"{cells[:budget]}{BUDGET_LINE}{cells[budget:]}"
