"""From an option the solver found to the plan that is run."""

from __future__ import annotations

from dataclasses import asdict
from itertools import accumulate

import numpy as np

from sppo import __version__
from sppo.activations.placement import SubsequencePlacement
from sppo.config.run import RunConfig
from sppo.cost.copy_room import block_layout, stage_blocks, staging_bytes
from sppo.cost.flops import step_flops
from sppo.cost.stage_cost import row_bytes_of
from sppo.planning.evaluated_candidate import EvaluatedCandidate
from sppo.planning.plan import (
    PLAN_VERSION,
    ExecutionPlan,
    Prediction,
    StagePlan,
    boundaries_of,
    digest_of,
    planned_part,
)
from sppo.planning.simulated_candidate import candidate_program
from sppo.planning.simulated_memory import simulated_device_bytes


def make_plan(run: RunConfig, option: EvaluatedCandidate) -> ExecutionPlan:
    """The plan for `run` that does what `option` says."""
    candidate = option.candidate
    hardware = candidate.workload.hardware
    part = planned_part(run)
    program = (
        candidate_program(candidate, costs=option.costs)
        if option.timeline is None
        else option.timeline.schedule
    )
    return ExecutionPlan(
        version=PLAN_VERSION,
        made_by=__version__,
        run=part,
        run_digest=digest_of(part),
        hardware=hardware,
        hardware_digest=digest_of(asdict(hardware)),
        data_parallel_degree=candidate.data_parallel_degree,
        pipeline_parallel_degree=candidate.pipeline_parallel_degree,
        sequence_parallel_degree=candidate.workload.sequence_parallel_degree,
        sequence_parallel=candidate.workload.sequence_parallel,
        zero=candidate.zero,
        sequences=candidate.sequences,
        boundaries=boundaries_of(candidate.lengths),
        schedule=candidate.schedule,
        policy=option.effective_policy,
        stages=_stages(option),
        predicted=predict(run, option),
        program_digest=program.digest(),
    )


def predict(run: RunConfig, option: EvaluatedCandidate) -> Prediction:
    """What a step of `option` takes."""
    candidate, time = option.candidate, option.time
    hardware = candidate.workload.hardware
    length, sequences = run.sequence.length, run.train.sequences_per_step
    flops = step_flops(run.model, length=length, sequences=sequences)
    peak = hardware.device.flops_per_s(run.train.dtype) * candidate.num_devices
    on_host = hardware.node.host_memory_bytes > 0
    tier = option.tier_peak_bytes
    costs = option.costs
    busiest = int(np.argmax((costs.forward_s + costs.backward_s + costs.weight_s).sum(axis=1)))
    backward = (costs.backward_s + costs.weight_s)[busiest]
    exposed = time.exposed_copy_s
    if option.timeline is not None:
        exposed = max(track.idle_s("copy") for track in option.timeline.ranks)
    return Prediction(
        provenance=hardware.provenance,
        simulated=option.timeline is not None,
        step_s=option.step_s,
        forward_s=float(costs.forward_s[busiest].sum()),
        backward_s=float(backward.sum()),
        update_s=time.update_s,
        exposed_copy_s=exposed,
        tokens_per_s_per_gpu=length * sequences / option.step_s / candidate.num_devices,
        mfu=flops / option.step_s / peak,
        bubble_fraction=_bubble_fraction(option),
        device_peak_bytes=max(option.device_peak_bytes, *(simulated_device_bytes(option) or (0,))),
        host_peak_bytes=tier if on_host else _staging_bytes(option),
        disk_peak_bytes=0 if on_host else tier,
        offload_ratios=offload_ratios(option),
    )


def _staging_bytes(assessment: EvaluatedCandidate) -> int:
    """Host memory in front of a disk; part of the device's where that is RAM."""
    return staging_bytes(assessment.candidate, decisions=assessment.decisions)


def offload_ratios(assessment: EvaluatedCandidate) -> tuple[float, ...]:
    """Share of its saved bytes that each subsequence moves, on the first stage."""
    row_bytes = row_bytes_of(assessment.candidate)[0]
    offloaded = assessment.decisions.offloaded[0] @ row_bytes
    whole = assessment.decisions.tokens * row_bytes.sum()
    return tuple(float(round(share, 4)) for share in offloaded / whole)


def _bubble_fraction(option: EvaluatedCandidate) -> float:
    if option.timeline is not None:
        return option.timeline.bubble_fraction
    time, ranks = option.time, option.candidate.pipeline_parallel_degree
    return max(0.0, 1 - time.busy_s / (ranks * time.step_s))


def _stages(assessment: EvaluatedCandidate) -> tuple[StagePlan, ...]:
    candidate = assessment.candidate
    stages = []
    for stage, layers in enumerate(candidate.stages):
        stages.append(
            StagePlan(
                first_layer=layers.start,
                num_layers=len(layers),
                subsequences=_subsequences(assessment, stage=stage),
                memory=assessment.memory[stage],
            )
        )
    return tuple(stages)


def _subsequences(
    assessment: EvaluatedCandidate, *, stage: int
) -> tuple[SubsequencePlacement, ...]:
    """Blocks lie one behind the other: offsets are decided here, not at run time."""
    decisions = assessment.decisions
    shape = block_layout(assessment.candidate, stage=stage)
    sizes = [sum(blocks) for blocks in stage_blocks(decisions, shape, stage=stage)]
    offsets = [0, *accumulate(sizes[:-1])]
    retained, offloaded, recomputed = (
        [(int(x), int(a), int(rest)) for x, a, rest in table[stage].tolist()]
        for table in (decisions.retained, decisions.offloaded, decisions.recomputed)
    )
    return tuple(
        SubsequencePlacement(*row)
        for row in zip(retained, offloaded, recomputed, offsets, strict=True)
    )
