"""A candidate as ``sppo solve`` and ``sppo estimate`` report it: JSON values, words, memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from sppo.activations.tensor_classes import ATTENTION, LINEAR
from sppo.cli.printing import Screen, table
from sppo.cost.candidate import Candidate
from sppo.cost.linear_attention.states import state_bytes
from sppo.cost.memory.stage_memory import BUCKETS, StageMemory, tier_buckets
from sppo.cost.stages.saved_bytes import row_bytes_of
from sppo.hardware.description import HardwareSpec, Tier
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.shortfall import Shortfall
from sppo.planning.validation_plan import ValidationPlan
from sppo.units import format_bytes

TIER_NAMES: Mapping[Tier, str] = {
    "device": "the device",
    "host": "host memory",
    "disk": "a file on the disk",
}
_MOST_GROUPS = 4


def choices_json(evaluated: EvaluatedCandidate) -> dict[str, Any]:
    """Return the cuts, schedule and placement of a candidate as JSON values."""
    candidate = evaluated.candidate
    return {
        "num_subsequences": len(candidate.lengths),
        "subsequence_lengths": list(candidate.lengths),
        "schedule": candidate.schedule,
        "policy": evaluated.effective_policy,
        "kv": evaluated.kv,
        "state": asdict(candidate.state),
    }


def stages_json(evaluated: EvaluatedCandidate) -> list[dict[str, Any]]:
    """Return the layers of every stage and the memory of its pipeline rank as JSON values."""
    candidate, reports = evaluated.candidate, [memory_json(held) for held in evaluated.memory]
    return [
        {
            "first_layer": layers.start,
            "num_layers": len(layers),
            "rank": candidate.rank_of_stage(stage),
            **reports[candidate.rank_of_stage(stage)],
        }
        for stage, layers in enumerate(candidate.stages)
    ]


def memory_json(held: StageMemory) -> dict[str, Any]:
    """Return the memory of a rank as JSON values: one device by bucket, then the further tiers."""
    return {**asdict(held), "device_bytes": held.device.total_bytes}


def shortfall_json(shortfall: Shortfall | None) -> dict[str, Any] | None:
    """Return a shortfall as JSON values: which memory is short, and by how much."""
    if shortfall is None:
        return None
    return {**asdict(shortfall), "short_bytes": shortfall.short_bytes}


def validation_json(plan: ValidationPlan | None) -> dict[str, Any]:
    """Return the plan of validations as JSON values of a key; {} if there are none."""
    if plan is None:
        return {}
    sets = [
        {
            "name": own.name,
            "sequences": own.num_samples,
            "length": own.boundaries[-1],
            "num_subsequences": len(own.boundaries) - 1,
            "at_once": own.at_once,
            "seconds": own.seconds,
            "peak_bytes": [rank.total_bytes for rank in own.memory],
        }
        for own in plan.sets
    ]
    totals = {"every": plan.every, "seconds": plan.seconds, "share": plan.share}
    return {"validation": {**totals, "problem": plan.problem, "sets": sets}}


def validation_line(plan: ValidationPlan | None) -> Iterator[str]:
    """Yield the size, time and memory of validations; nothing if there are none."""
    if plan is not None:
        yield f"validation: {plan.text()}"


def hardware_json(hardware: HardwareSpec) -> dict[str, Any]:
    """Return the machine's name, size and memory budgets as JSON values."""
    return {
        "name": hardware.name,
        "provenance": hardware.provenance,
        "num_nodes": hardware.num_nodes,
        "num_devices": hardware.num_devices,
        "device_budget_bytes": hardware.device.usable_bytes,
        "host_budget_bytes": hardware.host_bytes_per_device,
        "disk_budget_bytes": hardware.disk_bytes_per_device,
    }


def policy_text(evaluated: EvaluatedCandidate) -> str:
    """Return what happens to saved activations, in fractions of their bytes over all stages."""
    placement = evaluated.placement
    row_bytes = row_bytes_of(evaluated.candidate)[:, None, :]
    retained, offloaded, recomputed = (
        (table * row_bytes).sum(axis=(0, 1))
        for table in (placement.retained, placement.offloaded, placement.recomputed)
    )
    whole = float((retained + offloaded + recomputed).sum())
    kv = ""
    if evaluated.kv != "retained":
        kv = f"; K and V are {evaluated.kv} between a stage's forward and its backward"
        if recomputed_stages := evaluated.candidate.kv_recomputed:
            kv += f", and recomputed on {recomputed_stages} stages of a rank"
    if any(evaluated.candidate.recomputes_windows):
        kv += "; K and V of layers with a sliding window are recomputed"
    if retained.sum() == whole:
        return f"every saved tensor stays on the device until its backward{kv}"
    shares = {
        "retained on the device": retained.sum(),
        f"offloaded to {TIER_NAMES[evaluated.candidate.tier]}": offloaded.sum(),
        "recomputed by projections": recomputed[LINEAR],
        "recomputed by attention": recomputed[ATTENTION],
    }
    parts = [f"{share / whole:.0%} is {fate}" for fate, share in shares.items() if share]
    return f"of the saved bytes {', '.join(parts)}{kv}"


def states_line(candidate: Candidate) -> Iterator[str]:
    """Yield what layers with linear attention hold in place of K and V; nothing without any."""
    workload, model = candidate.workload, candidate.workload.model
    if model.linear_attention is None:
        return
    linear = model.num_layers - model.num_attention_layers
    each = state_bytes(model, workload.element_bytes, workload.sequence_parallel_degree)
    yield (
        f"{linear} of {model.num_layers} layers keep a state of {format_bytes(each)} a subsequence "
        "in place of K and V: longer subsequences cost nothing there"
    )


# Memory


def memory_screen(evaluated: EvaluatedCandidate) -> Screen:
    """Yield the memory of one device of each rank by bucket, and of the tiers behind it.

    Ranks with equal memory share a column. Empty buckets are left out.
    """
    groups, candidate = rank_groups(evaluated.memory), evaluated.candidate
    shown = shown_groups(groups, most=_MOST_GROUPS)
    budget = candidate.workload.hardware.device.usable_bytes
    yield f"memory of one device of each rank; its budget is {format_bytes(budget)}"
    held = list(shown.values())
    rows: list[Sequence[str] | None] = []
    for name, (letter, label) in BUCKETS.items():
        amounts = [getattr(each.device, name) for each in held]
        if any(amounts):
            rows.append([letter, label, *map(format_bytes, amounts)])
    rows.append(None)
    rows.append(["", "one device", *(format_bytes(each.device.total_bytes) for each in held)])
    for place in ("host", "disk"):
        behind = [
            tier_buckets(each, place, activations=candidate.tier, state=candidate.state)
            for each in held
        ]
        for name in behind[0]:
            amounts = [buckets[name] for buckets in behind]
            if any(amounts):
                rows.append(["", f"{name} in {TIER_NAMES[place]}", *map(format_bytes, amounts)])
    yield table(["", "", *shown], rows, left=2)
    hidden = len(groups) - len(shown)
    if hidden:
        yield f"and {hidden} more kinds of ranks; --json lists all"


def host_memory_text(device_bytes: int, *, node_bytes: int) -> str:
    """Return the peak host memory of the device that uses most of it, and of a node, in words."""
    return (
        f"host memory: {format_bytes(device_bytes)} for the device that uses most, at most "
        f"{format_bytes(node_bytes)} for a node"
    )


def rank_groups(memory: Sequence[StageMemory]) -> dict[str, StageMemory]:
    """Return the memory of neighbouring ranks with equal memory, by their name: ``ranks 1-6``."""
    groups = {}
    for held, members in groupby(range(len(memory)), key=memory.__getitem__):
        first, *others = members
        groups[f"ranks {first}-{others[-1]}" if others else f"rank {first}"] = held
    return groups


def shown_groups(groups: Mapping[str, StageMemory], *, most: int) -> dict[str, StageMemory]:
    """Return at most `most` groups in order: the first, the last, and the fullest others."""
    names = list(groups)
    by_size = sorted(names[1:-1], key=lambda name: groups[name].device.total_bytes, reverse=True)
    chosen = {names[0], *by_size[: most - 2], names[-1]}
    return {name: held for name, held in groups.items() if name in chosen}
