"""JSON report of ``sppo solve --json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sppo.cli.output.solve_text import launch_commands
from sppo.config.run import RunConfig
from sppo.cost.memory.stage_memory import StageMemory
from sppo.hardware.description import HardwareSpec
from sppo.planning.advice import Advice, too_long_for
from sppo.planning.improvements import Improvement
from sppo.planning.make_plan import predict
from sppo.planning.search.candidate_search import Rejection
from sppo.planning.search.choices import Degrees
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.shortfall import Shortfall
from sppo.planning.search.simulated_candidate import simulated_device_bytes
from sppo.planning.search.solver import Solution, nearest_rejection

if TYPE_CHECKING:
    from sppo.planning.ablation import AblationRow

MFU_DEFINITION = (
    "causal model FLOPs, nothing recomputed (6·weights·tokens + 6·S²·heads·head size a layer), "
    "over time · devices · peak"
)


def solution_report(
    solution: Solution,
    *,
    paying: Sequence[Improvement] = (),
    ablation: Sequence[AblationRow] = (),
    train: str,
    output: Path | None = None,
) -> dict[str, Any]:
    """Return a solution as JSON values; the best candidate is also the first of the candidates."""
    assert solution.best is not None, "failure_report is for the other case"
    run, best = solution.run, solution.best
    report: dict[str, Any] = {
        "feasible": True,
        "best": candidate_report(run, best),
        "candidates": [
            candidate_report(run, evaluated) for evaluated in (best, *solution.runners_up)
        ],
        "rejected": [rejection_report(rejection) for rejection in solution.rejected],
        "by_num_subsequences": [
            {
                "num_subsequences": len(evaluated.candidate.lengths),
                "step_s": evaluated.step_s,
                "policy": evaluated.effective_policy,
                "kv": evaluated.kv,
                "state": asdict(evaluated.candidate.state),
                "simulated": evaluated.simulated is not None,
            }
            for evaluated in solution.by_num_subsequences
        ],
        "improvements": [asdict(improvement) for improvement in paying],
        "devices_left_over": solution.hardware.num_devices - best.degrees.num_devices,
        "launch": list(
            launch_commands(
                best.degrees,
                devices_per_node=solution.hardware.node.num_devices,
                train=train,
            )
        ),
        "hardware": hardware_report(solution.hardware),
        "mfu_definition": MFU_DEFINITION,
        "plan": None if output is None else str(output),
    }
    if ablation:
        report["ablation"] = [asdict(row) for row in ablation]
    return report


def failure_report(solution: Solution, *, changes: Sequence[Advice]) -> dict[str, Any]:
    """Return why nothing fits, and which changes would make it fit, as JSON values."""
    nearest = nearest_rejection(solution.rejected)
    return {
        "feasible": False,
        "best": None,
        "candidates": [],
        "nearest": None if nearest is None else rejection_report(nearest),
        "too_long": too_long_for(solution.run, hardware=solution.hardware),
        "advice": [asdict(advice) for advice in changes],
        "rejected": [rejection_report(rejection) for rejection in solution.rejected],
        "hardware": hardware_report(solution.hardware),
    }


def candidate_report(run: RunConfig, evaluated: EvaluatedCandidate) -> dict[str, Any]:
    """Return an evaluated candidate as JSON values."""
    candidate = evaluated.candidate
    prediction = predict(run, evaluated)
    predicted = asdict(prediction)
    simulated = simulated_device_bytes(evaluated)
    return {
        **degrees_report(evaluated.degrees),
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
        "stages": stage_reports(evaluated),
    }


def stage_reports(evaluated: EvaluatedCandidate) -> list[dict[str, Any]]:
    """Return the layers of every stage and the memory of its pipeline rank as JSON values."""
    candidate, reports = evaluated.candidate, [memory_report(held) for held in evaluated.memory]
    return [
        {
            "first_layer": layers.start,
            "num_layers": len(layers),
            "rank": candidate.rank_of_stage(stage),
            **reports[candidate.rank_of_stage(stage)],
        }
        for stage, layers in enumerate(candidate.stages)
    ]


def memory_report(held: StageMemory) -> dict[str, Any]:
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


def rejection_report(rejection: Rejection) -> dict[str, Any]:
    """Return a rejected candidate as JSON values."""
    return {
        **degrees_report(rejection.degrees),
        "num_subsequences": rejection.num_subsequences,
        "policy": rejection.policy,
        "reason": rejection.reason,
        "shortfall": shortfall_report(rejection.shortfall),
    }


def shortfall_report(shortfall: Shortfall | None) -> dict[str, Any] | None:
    """Return a shortfall as JSON values: which memory is short, and by how much."""
    if shortfall is None:
        return None
    return {**asdict(shortfall), "short_bytes": shortfall.short_bytes}


def hardware_report(hardware: HardwareSpec) -> dict[str, Any]:
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


def degrees_report(degrees: Degrees) -> dict[str, int]:
    """Return degrees of parallelism by their names in the run file."""
    return {
        "sequence_parallel_degree": degrees.sequence_parallel,
        "pipeline_parallel_degree": degrees.pipeline_parallel,
        "data_parallel_degree": degrees.data_parallel,
    }
