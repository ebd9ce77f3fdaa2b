"""Messages of a run that does not fit in the free memory of a machine, with what to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from sppo.config.run import RunConfig
from sppo.cost.candidate import Candidate
from sppo.cost.memory.stage_memory import (
    IN_FRONT_OF_DISK,
    OFFLOADED,
    SAVED_IN_BACKGROUND,
    bucket_label,
    tier_buckets,
)
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.units import format_bytes

_CHANGES = {
    OFFLOADED: "a lower activations.offload_ratio or activations.kv=retain",
    "weights": "state.weights=device",
    "gradients": "state.gradients=device",
    "optimizer states": "state.optimizer=device",
    IN_FRONT_OF_DISK: "activations.tier=device",
    SAVED_IN_BACKGROUND: "checkpoint.async_save=false",
}
"""What to write for less in a bucket of a tier."""


def too_large(run: RunConfig, evaluated: EvaluatedCandidate) -> str:
    """Return the message of a run whose plan does not fit.

    Args:
        run: Validated run configuration.
        evaluated: Candidate of the run, which lacks memory.
    """
    shortfall, candidate = evaluated.shortfall, evaluated.candidate
    assert shortfall is not None, "only called where something is short"
    if shortfall.place != "device":
        held, place = evaluated.memory[shortfall.rank], shortfall.place
        buckets = tier_buckets(held, place, activations=candidate.tier, state=candidate.state)
        room = shortfall.available_bytes
        text = tier_too_small(run, place=place, buckets=buckets, room_bytes=room)
        lacks = evaluated.device_peak_bytes - candidate.budget_bytes
        also = f"; device memory is short, too, by {format_bytes(lacks)}" if lacks > 0 else ""
        return text + also
    policy = run.activations.policy
    if policy in ("auto", "hybrid"):
        how, change = "even with everything recomputed", _leave_device(run, candidate)
    else:
        how, change = f"with activations.policy={policy}", "write activations.policy=auto, "
    return (
        f"a sequence of {run.sequence.length} tokens needs {format_bytes(shortfall.needed_bytes)} "
        f"(most of it {bucket_label(shortfall.bucket)}: {format_bytes(shortfall.bucket_bytes)}) "
        f"{how}, and {format_bytes(shortfall.available_bytes)} may be used; {change}shorten "
        "sequence.length or take a smaller model"
    )


def _leave_device(run: RunConfig, candidate: Candidate) -> str:
    """Return advice on what would let the training state leave the device; empty if it may."""
    hardware = candidate.workload.hardware
    node, on_cpu = hardware.node, hardware.device.kind == "cpu"
    if not (node.disk_bytes if on_cpu else node.host_memory_bytes):
        return f"write activations.{'disk=DIR' if on_cpu else 'host_memory=auto'}, "
    return "write state.optimizer=auto, " if run.state.optimizer == "device" else ""


def tier_too_small(
    run: RunConfig, *, place: Literal["host", "disk"], buckets: Mapping[str, int], room_bytes: int
) -> str:
    """Return the message of a rank that stores more in host memory or on the disk than fits.

    Args:
        run: Validated run configuration.
        place: The tier that is too small.
        buckets: Bytes that the rank stores there, by memory bucket.
        room_bytes: Bytes that it may use there.
    """
    stored = {name: size for name, size in buckets.items() if size}
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in stored.items())
    changes = dict.fromkeys(_CHANGES[name] for name in stored)
    if place == "host":
        where, enlarge = "host memory", "end other programs of this machine"
    else:
        where = f"activations.disk={run.activations.disk}"
        enlarge = "name a directory on a larger disk"
    if getattr(run.activations, f"{place}_memory") != "auto":
        enlarge = f"raise activations.{place}_memory, or {enlarge}"
    return (
        f"{parts} need more of {where} than the {format_bytes(room_bytes)} that may be used: write "
        f"{', '.join(changes)}, or {enlarge}"
    )
