"""Messages of a run that does not fit in the free memory of a machine, with what to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from sppo.config.run import RunConfig
from sppo.cost.candidate import Candidate, of_ranks
from sppo.cost.kv import kv_tier_bytes
from sppo.cost.memory.stage_memory import (
    IN_FRONT_OF_DISK,
    OFFLOADED,
    SAVED_IN_BACKGROUND,
    bucket_label,
    tier_buckets,
)
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.units import format_bytes


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
        text = tier_too_small(run, candidate, place=place, buckets=buckets, room_bytes=room)
        lacks = evaluated.device_peak_bytes - candidate.budget_bytes
        also = f"; device memory is short, too, by {format_bytes(lacks)}" if lacks > 0 else ""
        return text + also
    policy = run.activations.policy
    if policy in ("auto", "hybrid"):
        how = "even with everything recomputed"
        change = "let state leave the device (state.optimizer, activations.disk, host_memory)"
    else:
        how, change = f"with activations.policy={policy}", "write activations.policy=auto"
    return (
        f"a sequence of {run.sequence.length} tokens needs {format_bytes(shortfall.needed_bytes)} "
        f"(most of it {bucket_label(shortfall.bucket)}: {format_bytes(shortfall.bucket_bytes)}) "
        f"{how}, and {format_bytes(shortfall.available_bytes)} may be used; {change}, shorten "
        "sequence.length or take a smaller model"
    )


def tier_too_small(
    run: RunConfig,
    candidate: Candidate,
    *,
    place: Literal["host", "disk"],
    buckets: Mapping[str, int],
    room_bytes: int,
) -> str:
    """Return the message of a rank that stores more in host memory or on the disk than fits.

    Args:
        run: Validated run configuration.
        candidate: Candidate of the run.
        place: The tier that is too small.
        buckets: Bytes that the rank stores there, by memory bucket.
        room_bytes: Bytes that it may use there.
    """
    asked, state = run.activations, dict(buckets)
    copied, staged = state.pop(SAVED_IN_BACKGROUND, 0), state.pop(IN_FRONT_OF_DISK, 0)
    offloaded = state.pop(OFFLOADED, 0)
    most_kv = candidate.sequences * int(of_ranks(candidate, kv_tier_bytes(candidate)).max())
    kv = min(offloaded, most_kv)
    stored = (
        (
            offloaded - kv,
            f"activations.policy={asked.policy} offloads",
            "a lower activations.offload_ratio",
        ),
        (kv, f"activations.kv={asked.kv} offloads", "activations.kv=retain or recompute"),
        (staged, "activations on their way to a disk take", "activations.tier=device"),
        (sum(state.values()), "the section state moves", "state.optimizer=device"),
        (copied, "checkpoint.async_save copies", "checkpoint.async_save=false"),
    )
    parts = ", ".join(f"{what} {format_bytes(size)}" for size, what, _ in stored if size)
    changes = ", ".join(change for size, _, change in reversed(stored) if size)
    where = "host memory" if place == "host" else f"activations.disk={asked.disk}"
    limit = getattr(asked, f"{place}_memory")
    if limit != "auto" and limit // candidate.workload.hardware.node.num_devices <= room_bytes:
        enlarge = f"raise activations.{place}_memory"
    elif place == "host":
        enlarge = "end other programs of this machine"
    else:
        enlarge = "name a directory on a larger disk"
    return (
        f"{parts} to {where}, of which {format_bytes(room_bytes)} may be used: write {changes}, or "
        f"{enlarge}"
    )
