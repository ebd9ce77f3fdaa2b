"""Names and letters of the buckets of memory, for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from sppo.cost.memory.stage_memory import MemoryBuckets


@dataclass(frozen=True, slots=True)
class BucketLabel:
    """Letter and name of a field of :class:`sppo.cost.memory.stage_memory.MemoryBuckets` in text.

    Attributes:
        field: Name of the field of MemoryBuckets, including ``_bytes``.
        letter: Letter of the bucket in tables.
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
    BucketLabel("communication_bytes", "M", "messages"),
    BucketLabel("growth_bytes", "P", "process growth"),
    BucketLabel("communicators_bytes", "N", "NCCL communicators"),
)
assert [bucket.field for bucket in BUCKETS] == [field.name for field in fields(MemoryBuckets)], (
    "every bucket is shown, in its order"
)
_LABELS: Mapping[str, str] = {bucket.field: bucket.label for bucket in BUCKETS}


def bucket_text(name: str) -> str:
    """Return the label of a bucket, named with or without ``_bytes``; unknown names in words."""
    return _LABELS.get(f"{name.removesuffix('_bytes')}_bytes", name.replace("_", " "))
