"""The message of a run that does not fit in the free memory of a machine, with what to change."""

from __future__ import annotations

from sppo.config.run import RunConfig
from sppo.cost.kv import offloaded_kv_bytes
from sppo.cost.memory.tier_memory import (
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
        return _tier_too_small(run, evaluated)
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


def _tier_too_small(run: RunConfig, evaluated: EvaluatedCandidate) -> str:
    """Return the message of a rank that stores more in host memory or on the disk than fits."""
    candidate, shortfall = evaluated.candidate, evaluated.shortfall
    assert shortfall is not None, "only called where something is short"
    assert shortfall.place != "device", "only called of a tier behind it"
    held, place, room = evaluated.memory[shortfall.rank], shortfall.place, shortfall.available_bytes
    buckets = dict(tier_buckets(held, place, activations=candidate.tier, state=candidate.state))
    offloaded = buckets.pop(OFFLOADED)
    staged, copied = buckets.pop(IN_FRONT_OF_DISK, 0), buckets.pop(SAVED_IN_BACKGROUND, 0)
    state = sum(buckets.values())
    kept = offloaded + staged + state
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
        ratio = _offloaded_fraction(evaluated)
        fixes.append(
            offload_less(
                room_bytes=room - state, needed_bytes=offloaded, kv_bytes=kv_bytes, ratio=ratio
            )
        )
    parts = ", ".join(f"{what} {format_bytes(size)}{more}" for size, what, more in stored if size)
    where = "host memory" if place == "host" else f"activations.disk={run.activations.disk}"
    if getattr(run.activations, f"{place}_memory") != "auto":
        enlarge = f"raise activations.{place}_memory"
    elif place == "host":
        enlarge = "end other programs of this machine"
    else:
        enlarge = "name a directory on a larger disk"
    return (
        f"{parts} to {where}, of which {format_bytes(shortfall.available_bytes)} may be used: "
        f"{' and '.join(fixes)}, or {enlarge}"
    )


def offload_less(*, room_bytes: float, needed_bytes: float, kv_bytes: int, ratio: float) -> str:
    """Return advice on what would fit in a tier: a lower offload ratio, or K and V elsewhere.

    Args:
        room_bytes: Bytes available in the tier.
        needed_bytes: Offloaded bytes, including K and V.
        kv_bytes: Offloaded bytes of K and V.
        ratio: Offloaded fraction of the activations without K and V.
    """
    if 0 < kv_bytes >= min(room_bytes, needed_bytes):
        return "activations.kv=retain or recompute offloads no K and V"
    fits = (room_bytes - kv_bytes) / (needed_bytes - kv_bytes)
    rounded_down = int(fits * ratio * 100) / 100
    return f"activations.offload_ratio={rounded_down:.2f} would fit"


def _offloaded_fraction(evaluated: EvaluatedCandidate) -> float:
    """Return the bytes offloaded on the first stage as a fraction of the offloadable bytes.

    Offloadable are the bytes that all subsequences except the last save.
    """
    row_bytes = row_bytes_of(evaluated.candidate)[0]
    offloaded = float((evaluated.placement.offloaded[0] @ row_bytes).sum())
    offloadable = float((evaluated.placement.tokens[:-1] * row_bytes.sum()).sum())
    return min(1.0, offloaded / offloadable) if offloadable else 0.0
