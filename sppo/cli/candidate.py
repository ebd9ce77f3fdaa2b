"""A candidate in JSON values and in words, as ``sppo solve`` and ``sppo estimate`` report it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sppo.activations.tensor_classes import ATTENTION, LINEAR
from sppo.cli.memory import TIER_NAMES
from sppo.cost.memory.stage_memory import StageMemory
from sppo.cost.stage_cost import row_bytes_of
from sppo.hardware.description import HardwareSpec
from sppo.planning.search.choices import Degrees
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.shortfall import Shortfall


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


def degrees_json(degrees: Degrees) -> dict[str, int]:
    """Return degrees of parallelism by their names in the run file."""
    return {
        "sequence_parallel_degree": degrees.sequence_parallel,
        "pipeline_parallel_degree": degrees.pipeline_parallel,
        "data_parallel_degree": degrees.data_parallel,
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
