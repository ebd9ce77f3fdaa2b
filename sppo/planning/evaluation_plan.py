"""Plan of an evaluation without training: stages, cuts and memory of forwards alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sppo.config.run import ActivationsConfig, RunConfig, StateConfig
from sppo.cost.memory.state_memory import state_memory
from sppo.hardware.description import HardwareSpec
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.plan import ExecutionPlan
from sppo.planning.run_plan import evaluation_boundaries, plan_run
from sppo.planning.validation_plan import SetPlan, SetPlanner

_UNBOUNDED_BYTES = 1 << 60
"""Memory of a plan of which only the layout is used."""


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """Layout of an evaluation, and what it takes."""

    layout: ExecutionPlan
    """Stages, groups of ranks, and tiers of the weights; its memory is that of the evaluation."""
    rows: SetPlan
    """Cuts, time and memory of the sequences that are evaluated."""


def plan_evaluation(
    run: RunConfig, *, hardware: HardwareSpec, lengths: Sequence[int], room_bytes: int
) -> EvaluationPlan:
    """Return the plan of an evaluation with the degrees of a run.

    Args:
        run: Validated run configuration.
        hardware: Description of the machine.
        lengths: Tokens of each sequence, or sample, that is evaluated.
        room_bytes: Free memory of one device.

    Raises:
        ValueError: The degrees do not fit the model.
        MemoryError: The evaluation does not fit; the message says what would.
    """
    layout = plan_run(
        _layout_run(run, hardware=hardware),
        hardware=hardware,
        available_bytes=_UNBOUNDED_BYTES,
        disk_bytes=_UNBOUNDED_BYTES,
        host_bytes=_UNBOUNDED_BYTES if hardware.device.kind == "cuda" else 0,
    )
    candidate = layout.candidate()
    alone = [
        replace(rank, device=replace(rank.device, gradients_bytes=0, optimizer_bytes=0))
        for rank in state_memory(candidate)
    ]
    planner = SetPlanner(run, step=candidate, training=alone)
    rows = planner.plan("data", lengths, room_bytes=room_bytes)
    if rows.peak_bytes > room_bytes:
        longest = planner.longest(rows, room_bytes=room_bytes)
        shorter = f"sequence.length={longest} fits here, or " if longest else ""
        raise MemoryError(
            f"evaluating: {rows.too_large(room_bytes)}: {shorter}evaluate on more devices"
        )
    stages = tuple(
        replace(
            stage,
            memory=replace(alone[number % len(alone)], device=rows.memory[number % len(alone)]),
        )
        for number, stage in enumerate(layout.stages)
    )
    return EvaluationPlan(replace(layout, stages=stages), rows)


def _layout_run(run: RunConfig, *, hardware: HardwareSpec) -> RunConfig:
    """Return a run of the stream whose plan has the layout of an evaluation.

    Nothing is saved and nothing is updated: only the weights may be in another tier.
    """
    parallel, leaves = run.parallel, run.state.weights in ("host", "disk")
    longest = run_of_longest_samples(run)
    changed: dict[str, object] = {
        "data.samples": "stream",
        "sequence.longer": "cut",
        "train.sequences_per_step": parallel.data_parallel_degree,
        "train.samples_per_step": None,
        "train.tokens_per_step": None,
        "parallel.multiplexed": "off",
        "parallel.schedule": "auto" if parallel.schedule == "sppo_msp" else parallel.schedule,
    }
    if run.sequence.boundaries is None:
        cuts = evaluation_boundaries(longest, hardware=hardware)
        changed["sequence.num_subsequences"] = len(cuts) - 1
    kept = ActivationsConfig(policy="retain", kv="retain", disk=run.activations.disk)
    state = run.state if leaves else StateConfig()
    return longest.with_values(changed).model_copy(update={"activations": kept, "state": state})
