"""Memory of one device of a pipeline rank: bytes on the device by bucket, and in the tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from sppo.cost.candidate import Candidate
from sppo.cost.state_tiers import StateTiers
from sppo.hardware.description import Tier


@dataclass(frozen=True, slots=True)
class MemoryBuckets:
    """Bytes on one device at the peak of a step, by purpose."""

    weights_bytes: int
    """Weights in the compute dtype: with ZeRO-3 a shard and the gathered parts; if weights live in
    another tier, those of two stages."""
    gradients_bytes: int
    """fp32 sums of gradients: whole with ZeRO-0 and 1, which reduce them once per step; with ZeRO-2
    and 3 a shard, and the parts that are whole until they are reduced after each use; if gradients
    live in another tier, those of two stages."""
    optimizer_bytes: int
    """Both moments of AdamW, and fp32 masters if the compute dtype is not fp32. If they live on a
    disk, slots through which buckets pass instead; if in host memory, 0."""
    kv_bytes: int
    """K and V of all sequences in flight, in the layers whose K and V are on the device at once;
    states of linear attention, and their gradients."""
    kv_gradients_bytes: int
    """fp32 gradients of K and V of the sequence and stage in backward."""
    activations_bytes: int
    """Retained saved tensors."""
    copies_bytes: int
    """Slots for blocks of saved tensors that are copied to or from the next tier."""
    loss_gradient_bytes: int
    """Gradient of the last layer's output, which is formed in forward."""
    working_bytes: int
    """Working set of the running subsequence (:mod:`sppo.cost.live_sets.working_set`), and the
    saved tensors that backward joins (:mod:`sppo.cost.memory.copy_room`)."""
    communication_bytes: int
    """Messages between stages, units that wait between two stages of a rank, tensors exchanged in a
    sequence-parallel group, and buffers of collectives."""
    growth_bytes: int = 0
    """Memory of the process beyond tensors, see :mod:`sppo.cost.memory.process_growth`."""
    communicators_bytes: int = 0
    """Buffers that NCCL allocates for the communicators of a GPU, outside of torch's allocator
    (:mod:`sppo.cost.communicators`)."""

    @property
    def total_bytes(self) -> int:
        """Sum of all buckets."""
        return sum(_bucket_bytes_of(self))

    @property
    def largest(self) -> str:
        """Name of the largest bucket."""
        sizes = _bucket_bytes_of(self)
        return [*BUCKETS][sizes.index(max(sizes))]


BUCKETS: Mapping[str, tuple[str, str]] = {
    "weights_bytes": ("W", "weights"),
    "gradients_bytes": ("G", "gradients"),
    "optimizer_bytes": ("O", "optimizer states"),
    "kv_bytes": ("K", "K and V"),
    "kv_gradients_bytes": ("D", "dK and dV"),
    "activations_bytes": ("A", "saved activations"),
    "copies_bytes": ("C", "room for copies"),
    "loss_gradient_bytes": ("L", "gradient of the loss"),
    "working_bytes": ("R", "running layer"),
    "communication_bytes": ("M", "messages"),
    "growth_bytes": ("P", "process growth"),
    "communicators_bytes": ("N", "NCCL communicators"),
}
"""Letter and label in tables of every field of :class:`MemoryBuckets`, in their order."""
_bucket_bytes_of: Callable[[MemoryBuckets], tuple[int, ...]] = attrgetter(*BUCKETS)
"""Function that returns the bytes of each bucket."""


def bucket_label(name: str) -> str:
    """Return the label of a bucket, named with or without ``_bytes``; unknown names in words."""
    _, label = BUCKETS.get(f"{name.removesuffix('_bytes')}_bytes", ("", name.replace("_", " ")))
    return label


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of one device of a pipeline rank, all stages of the rank together, in every tier."""

    device: MemoryBuckets
    """Bytes on the device, by bucket."""
    tier_activations_bytes: int
    """Bytes of offloaded tensors in the tier of activations."""
    host_optimizer_bytes: int
    """Bytes of optimizer states in the tier of the training state."""
    tier_weights_bytes: int = 0
    """Bytes of weights in the tier of the training state."""
    tier_gradients_bytes: int = 0
    """Bytes of gradients in the tier of the training state."""
    background_save_bytes: int = 0
    """Bytes of the copy of the training state in a GPU's host memory, not page-locked, while a
    checkpoint is written in the background; on a CPU the copy counts in `growth_bytes`."""
    staging_bytes: int = 0
    """Bytes of slots in a GPU's host memory through which tensors pass to and from a disk; on a CPU
    they are among the copies on the device."""

    @property
    def tier_state_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer states in the tier of the training state."""
        return self.tier_weights_bytes + self.tier_gradients_bytes + self.host_optimizer_bytes


OFFLOADED = "offloaded activations"
IN_FRONT_OF_DISK = "slots in front of the disk"
SAVED_IN_BACKGROUND = "checkpoint saved in the background"
"""Names of buckets of :func:`tier_buckets`; the last two are in host memory only."""


def tier_buckets(
    held: StageMemory, place: Literal["host", "disk"], *, activations: Tier, state: StateTiers
) -> Mapping[str, int]:
    """Return the bytes in one tier by bucket; each kind of tensor is in a single tier.

    Args:
        held: Memory of one device.
        place: Tier of the buckets.
        activations: Tier of offloaded activations, K and V.
        state: Tiers of the training state.
    """
    has_state = state.tier == place
    buckets = {
        OFFLOADED: held.tier_activations_bytes * (activations == place),
        "optimizer states": held.host_optimizer_bytes * has_state,
        "gradients": held.tier_gradients_bytes * has_state,
        "weights": held.tier_weights_bytes * has_state,
    }
    if place == "host":
        buckets[IN_FRONT_OF_DISK] = held.staging_bytes
        buckets[SAVED_IN_BACKGROUND] = held.background_save_bytes
    return buckets


def most_tier_bytes(
    memory: Iterable[StageMemory], place: Literal["host", "disk"], *, candidate: Candidate
) -> int:
    """Return the bytes in one tier of the device that uses most of it.

    Args:
        memory: Memory of one device of each pipeline rank.
        place: Tier of the bytes.
        candidate: Candidate that the memory belongs to.
    """
    buckets = (
        tier_buckets(held, place, activations=candidate.tier, state=candidate.state)
        for held in memory
    )
    return max(sum(of_device.values()) for of_device in buckets)


def node_host_bytes(memory: Iterable[StageMemory], *, candidate: Candidate) -> int:
    """Return the bytes of host memory of all devices of one node together; 0 on a CPU.

    Args:
        memory: Memory of one device of each pipeline rank.
        candidate: Candidate that the memory belongs to.
    """
    hardware = candidate.workload.hardware
    if hardware.device.kind == "cpu":
        return 0
    devices = min(hardware.node.num_devices, candidate.num_devices)
    return most_tier_bytes(memory, "host", candidate=candidate) * devices
