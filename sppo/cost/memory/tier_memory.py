"""Bytes of one device in host memory and on disk, by bucket."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from sppo.cost.candidate import Candidate
from sppo.cost.memory.stage_memory import StageMemory
from sppo.cost.state_tiers import StateTiers
from sppo.hardware.description import Tier

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


def tier_bytes(
    held: StageMemory, place: Literal["host", "disk"], *, activations: Tier, state: StateTiers
) -> int:
    """Return the bytes in one tier, the sum of :func:`tier_buckets`."""
    return sum(tier_buckets(held, place, activations=activations, state=state).values())


def most_tier_bytes(
    memory: Iterable[StageMemory], place: Literal["host", "disk"], *, candidate: Candidate
) -> int:
    """Return the bytes in one tier of the device that uses most of it.

    Args:
        memory: Memory of one device of each pipeline rank.
        place: Tier of the bytes.
        candidate: Candidate that the memory belongs to.
    """
    activations, state = candidate.tier, candidate.state
    return max(tier_bytes(held, place, activations=activations, state=state) for held in memory)


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
