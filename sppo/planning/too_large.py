"""The message of a run that does not fit in the free memory of a machine, with what to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from sppo.activations.placement import ActivationPlacement
from sppo.config.run import RunConfig
from sppo.cost.candidate import Candidate
from sppo.cost.kv import offloaded_kv_bytes
from sppo.cost.memory.stage_memory import (
    IN_FRONT_OF_DISK,
    OFFLOADED,
    SAVED_IN_BACKGROUND,
    tier_buckets,
)
from sppo.cost.stage_cost import row_bytes_of
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.units import format_bytes


def too_large(run: RunConfig, evaluated: EvaluatedCandidate, *, available_bytes: int) -> str:
    """Return the message of a run whose plan does not fit.

    Args:
        run: Validated run configuration.
        evaluated: Candidate of the run, which lacks memory.
        available_bytes: Free memory of one device, of which a chosen policy fills a part.
    """
    shortfall, policy, length = evaluated.shortfall, run.activations.policy, run.sequence.length
    assert shortfall is not None, "only called where something is short"
    if shortfall.place != "device":
        candidate, held = evaluated.candidate, evaluated.memory[shortfall.rank]
        lacks = evaluated.device_peak_bytes - candidate.budget_bytes
        also = f"; device memory is short, too, by {format_bytes(lacks)}" if lacks > 0 else ""
        text = tier_too_small(
            run,
            candidate,
            evaluated.placement,
            place=shortfall.place,
            buckets=tier_buckets(
                held, shortfall.place, activations=candidate.tier, state=candidate.state
            ),
            room_bytes=shortfall.available_bytes,
        )
        return text + also
    needed = format_bytes(shortfall.needed_bytes)
    bucket = f"{shortfall.bucket.replace('_', ' ')}: {format_bytes(shortfall.bucket_bytes)}"
    if policy in ("auto", "hybrid"):
        return (
            f"a sequence of {length} tokens needs {needed} (most of it {bucket}) even with "
            f"everything recomputed, and {format_bytes(shortfall.available_bytes)} may be used of "
            f"{format_bytes(available_bytes)}; {_leave_device(run, evaluated)}shorten "
            "sequence.length or take a smaller model"
        )
    return (
        f"activations.policy={policy} needs {needed} (most of it {bucket}) for a sequence of "
        f"{length} tokens, and {format_bytes(available_bytes)} are available; write "
        "activations.policy=auto, shorten sequence.length or take a smaller model"
    )


def _leave_device(run: RunConfig, evaluated: EvaluatedCandidate) -> str:
    """Return advice on what would let optimizer states leave the device; empty if they may."""
    hardware = evaluated.candidate.workload.hardware
    on_cpu, node = hardware.device.kind == "cpu", hardware.node
    if not (node.disk_bytes if on_cpu else node.host_memory_bytes):
        return f"write activations.{'disk=DIR' if on_cpu else 'host_memory=auto'}, "
    return "write state.optimizer=auto, " if run.state.optimizer == "device" else ""


def tier_too_small(
    run: RunConfig,
    candidate: Candidate,
    placement: ActivationPlacement,
    *,
    place: Literal["host", "disk"],
    buckets: Mapping[str, int],
    room_bytes: int,
) -> str:
    """Return the message of a rank that stores more in host memory or on the disk than fits.

    Args:
        run: Validated run configuration.
        candidate: Candidate of the run.
        placement: Placement of its saved tensors.
        place: The tier that is too small.
        buckets: Bytes that the rank stores there, by memory bucket.
        room_bytes: Bytes that it may use there.
    """
    taken = dict(buckets)
    offloaded, staged = taken.pop(OFFLOADED, 0), taken.pop(IN_FRONT_OF_DISK, 0)
    copied = taken.pop(SAVED_IN_BACKGROUND, 0)
    state = sum(taken.values())
    kept, room = offloaded + staged + state, room_bytes
    kv_bytes = offloaded_kv_bytes(candidate)
    kv = f" with K and V ({format_bytes(kv_bytes)}, activations.kv)" if kv_bytes else ""
    stored = (
        (offloaded, f"activations.policy={run.activations.policy} offloads", kv),
        (staged, "activations on their way to a disk take", ""),
        (state, "the section state moves", ""),
        (copied, "checkpoint.async_save copies", ""),
    )
    fixes = []
    if copied > room or (copied and kept <= room):
        fixes.append("write checkpoint.async_save=false")
    else:
        room -= copied
    if state and state + staged > room:
        fixes.append("write state.optimizer=device (state.gradients, state.weights)")
    elif staged > room:
        fixes.append("write activations.tier=device")
    elif kept > room:
        room -= staged + state
        if 0 < kv_bytes >= min(room, offloaded):
            fixes.append("activations.kv=retain or recompute offloads no K and V")
        else:
            fits = (room - kv_bytes) / (offloaded - kv_bytes)
            ratio = int(100 * fits * _offloaded_fraction(candidate, placement)) / 100
            fixes.append(f"activations.offload_ratio={ratio:.2f} would fit")
    parts = ", ".join(f"{what} {format_bytes(size)}{more}" for size, what, more in stored if size)
    where = "host memory" if place == "host" else f"activations.disk={run.activations.disk}"
    limit = getattr(run.activations, f"{place}_memory")
    if limit != "auto" and limit // candidate.workload.hardware.node.num_devices <= room_bytes:
        enlarge = f"raise activations.{place}_memory"
    elif place == "host":
        enlarge = "end other programs of this machine"
    else:
        enlarge = "name a directory on a larger disk"
    return (
        f"{parts} to {where}, of which {format_bytes(room_bytes)} may be used: "
        f"{' and '.join(fixes)}, or {enlarge}"
    )


def _offloaded_fraction(candidate: Candidate, placement: ActivationPlacement) -> float:
    """Return the bytes offloaded on the first stage as a fraction of the offloadable bytes.

    Offloadable are the bytes that all subsequences except the last save.
    """
    row_bytes = row_bytes_of(candidate)[0]
    offloaded = float((placement.offloaded[0] @ row_bytes).sum())
    offloadable = float((placement.tokens[:-1] * row_bytes.sum()).sum())
    return min(1.0, offloaded / offloadable) if offloadable else 0.0
