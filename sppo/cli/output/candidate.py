"""A candidate in JSON values and in words, as ``sppo solve`` and ``sppo estimate`` report it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from sppo.activations.tensor_classes import ATTENTION, LINEAR
from sppo.cli.output.memory import TIER_NAMES
from sppo.cli.output.printing import say
from sppo.config.run import RunConfig
from sppo.cost.memory.stage_memory import StageMemory
from sppo.cost.stage_cost import row_bytes_of
from sppo.hardware.description import HardwareSpec
from sppo.planning.make_plan import predict
from sppo.planning.search.choices import Degrees
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.shortfall import Shortfall
from sppo.planning.search.simulated_candidate import simulated_device_bytes
from sppo.units import format_duration


def candidate_json(run: RunConfig, evaluated: EvaluatedCandidate) -> dict[str, Any]:
    """Return an evaluated candidate as JSON values."""
    candidate = evaluated.candidate
    prediction = predict(run, evaluated)
    predicted = asdict(prediction)
    simulated = simulated_device_bytes(evaluated)
    return {
        **degrees_json(evaluated.degrees),
        "num_subsequences": len(candidate.lengths),
        "subsequence_lengths": list(candidate.lengths),
        "offload_ratios": list(predicted.pop("offload_ratios")),
        "schedule": candidate.schedule,
        "virtual_stages": candidate.virtual_stages,
        "policy": evaluated.effective_policy,
        "kv": evaluated.kv,
        "kv_recomputed": candidate.kv_recomputed,
        "state": asdict(evaluated.candidate.state),
        "activation_tier": evaluated.candidate.tier,
        "sequences_per_replica": candidate.sequences,
        "predicted": predicted,
        "node_host_peak_bytes": evaluated.node_host_bytes,
        "simulated_device_bytes": None if simulated is None else list(simulated),
        "stages": stages_json(evaluated),
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
    return {
        "device": asdict(held.device),
        "device_bytes": held.device.total_bytes,
        "tier_activations_bytes": held.tier_activations_bytes,
        "host_optimizer_bytes": held.host_optimizer_bytes,
        "tier_gradients_bytes": held.tier_gradients_bytes,
        "tier_weights_bytes": held.tier_weights_bytes,
        "background_save_bytes": held.background_save_bytes,
        "staging_bytes": held.staging_bytes,
    }


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


def step_text(seconds: float) -> str:
    """Format seconds with four digits; `format_duration` would hide differences of candidates."""
    return f"{seconds:.4g} s" if 1 <= seconds < 1000 else format_duration(seconds)


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
    parts = []
    if retained.any():
        parts.append(f"{retained.sum() / whole:.0%} is retained on the device")
    if offloaded.any():
        tier = TIER_NAMES[evaluated.candidate.tier]
        parts.append(f"{offloaded.sum() / whole:.0%} is offloaded to {tier}")
    if recomputed[LINEAR]:
        parts.append(f"{recomputed[LINEAR] / whole:.0%} is recomputed by projections")
    if recomputed[ATTENTION]:
        parts.append(f"{recomputed[ATTENTION] / whole:.0%} is recomputed by attention")
    return f"of the saved bytes {', '.join(parts)}{kv}"


def train_command(run_file: Path, overrides: Sequence[str], *, output: Path | None) -> str:
    """Return the command that trains a run by its plan.

    Args:
        run_file: File of the run.
        overrides: Overrides of its keys that the plan was made with.
        output: File of the plan; None if it has not been written.
    """
    plan = str(output or "plan.json")
    return shlex.join(["sppo", "train", str(run_file), *overrides, "--plan", plan])


def launch_commands(degrees: Degrees, *, devices_per_node: int, train: str) -> tuple[str, ...]:
    """Return the commands that train by a plan: sppo on one node, torchrun and srun on several.

    Args:
        degrees: Degrees of the plan.
        devices_per_node: Devices of each node of the machine.
        train: Command that trains by the plan, see :func:`train_command`.
    """
    devices, group = degrees.num_devices, degrees.sequence_parallel
    if devices <= devices_per_node:
        return (train,)
    # Equal numbers on all nodes; no sequence-parallel group spans nodes if it fits on one.
    group = group if group <= devices_per_node else 1
    each = max(n for n in range(1, devices_per_node + 1) if devices % n == 0 and n % group == 0)
    nodes = devices // each
    meeting = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {each} {meeting} -m {train}",
        f"srun --nodes {nodes} --ntasks-per-node {each} {train}",
    )


def print_launch(commands: Sequence[str], *, output: Path | None, console: Console) -> None:
    """Print the commands that train by a plan, and how to write the plan if it is in no file."""
    say(console, *(f"launch: {command}" for command in commands), wraps=False)
    if output is None:
        say(console, "plan.json is not written yet: add -o plan.json")
