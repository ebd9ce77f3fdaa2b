"""Making an execution plan from the candidate that the solver chose."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from sppo.activations.subsequence_placement import SubsequencePlacement
from sppo.config.run import RunConfig
from sppo.cost.candidate import of_ranks
from sppo.cost.flops import ignored_flops, step_flops
from sppo.cost.memory.copy_room import stage_blocks
from sppo.cost.memory.unit_working_sets import block_layout
from sppo.cost.stages.saved_bytes import row_bytes_of
from sppo.planning.partition import boundaries_of
from sppo.planning.plan import PLAN_VERSION, ExecutionPlan, Prediction, StagePlan, planned_part
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.version import __version__


def make_plan(run: RunConfig, evaluated: EvaluatedCandidate) -> ExecutionPlan:
    """Return the execution plan of `run` with the decisions of an evaluated candidate."""
    candidate = evaluated.candidate
    return ExecutionPlan(
        version=PLAN_VERSION,
        made_by=__version__,
        run=planned_part(run),
        hardware=candidate.workload.hardware,
        data_parallel_degree=candidate.data_parallel_degree,
        pipeline_parallel_degree=candidate.pipeline_parallel_degree,
        sequence_parallel_degree=candidate.workload.sequence_parallel_degree,
        sequence_parallel=candidate.workload.sequence_parallel,
        zero=candidate.zero,
        sequences=candidate.sequences,
        boundaries=boundaries_of(candidate.lengths),
        schedule=candidate.schedule,
        policy=evaluated.effective_policy,
        stages=stage_plans(evaluated),
        predicted=predict(evaluated),
        program_digest=evaluated.executed_program().digest(),
        virtual_stages=candidate.virtual_stages,
        kv=candidate.kv or "retained",
        kv_recomputed=candidate.kv_recomputed,
        windowed_kv=candidate.windowed_kv or "retained",
        state=candidate.state,
        activation_tier=candidate.tier,
    )


def predict(evaluated: EvaluatedCandidate) -> Prediction:
    """Return the predicted time and memory of one step of an evaluated candidate."""
    candidate = evaluated.candidate
    workload, hardware = candidate.workload, candidate.workload.hardware
    sequences = candidate.sequences * candidate.data_parallel_degree
    length = sum(candidate.lengths)
    model, trainable = workload.model, workload.trainable
    flops = step_flops(model, trainable, length=length, sequences=sequences)
    ignored = round((1 - workload.label_share) * length * sequences)
    flops -= ignored_flops(model, ignored, trainable)
    peak = hardware.device.flops_per_s(workload.dtype) * candidate.num_devices
    forward_s, backward_s = compute_seconds(evaluated)
    first, placement = candidate.forward_only_stages, evaluated.placement
    row_bytes = row_bytes_of(candidate)[first]
    offloaded = (placement.offloaded[first] @ row_bytes) / (placement.tokens * row_bytes.sum())
    return Prediction(
        provenance=hardware.provenance,
        step_s=evaluated.step_s,
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=evaluated.time.update_s,
        exposed_copy_s=evaluated.simulated.exposed_copy_s,
        tokens_per_s_per_gpu=evaluated.tokens_per_s / candidate.num_devices,
        mfu=flops / evaluated.step_s / peak,
        bubble_fraction=evaluated.simulated.bubble_fraction,
        device_peak_bytes=evaluated.device_peak_bytes,
        host_peak_bytes=evaluated.host_peak_bytes,
        disk_peak_bytes=evaluated.disk_peak_bytes,
        offload_ratios=tuple(offloaded.round(4).tolist()),
    )


def compute_seconds(evaluated: EvaluatedCandidate) -> tuple[float, float]:
    """Return the seconds of all forwards and of all backwards of the busiest rank.

    Backwards include weight gradients and the recomputation of K and V.
    """
    candidate, costs = evaluated.candidate, evaluated.costs
    backward = costs.backward_s + costs.weight_s + costs.kv_recompute_s
    forward_s = of_ranks(candidate, costs.forward_s.sum(axis=1))
    backward_s = of_ranks(candidate, backward.sum(axis=1))
    busiest = int(np.argmax(forward_s + backward_s))
    return float(forward_s[busiest]), float(backward_s[busiest])


def stage_plans(evaluated: EvaluatedCandidate) -> tuple[StagePlan, ...]:
    """Return the plan of each stage, in the order of the layers.

    Packed blocks are contiguous in the tier; their offsets are decided here, not at run time.
    """
    candidate, placement = evaluated.candidate, evaluated.placement
    rows = zip(*(table.tolist() for table in placement), strict=True)
    stages = []
    for stage, (layers, of_stage) in enumerate(zip(candidate.stages, rows, strict=True)):
        blocks = stage_blocks(placement, block_layout(candidate, stage=stage), stage=stage)
        offsets = accumulate([0, *blocks.sum(axis=1).tolist()[:-1]])
        subsequences = tuple(
            SubsequencePlacement(tuple(retained), tuple(offloaded), tuple(recomputed), offset)
            for retained, offloaded, recomputed, offset in zip(*of_stage, offsets, strict=True)
        )
        memory = evaluated.memory[candidate.rank_of_stage(stage)]
        stages.append(StagePlan(layers.start, len(layers), subsequences, memory))
    return tuple(stages)
