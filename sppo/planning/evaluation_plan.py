"""Plan of an evaluation without training: stages, cuts and memory of forwards alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sppo.config.run import ActivationsConfig, RunConfig, StateConfig
from sppo.cost.memory.stage_memory import StageMemory
from sppo.cost.memory.state_memory import state_memory
from sppo.hardware.description import HardwareSpec
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.plan import ExecutionPlan
from sppo.planning.run_plan import evaluation_boundaries, plan_without_limits
from sppo.planning.validation_plan import SetPlan, SetPlanner
from sppo.schedule.orders.names import LOOPED


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """Layout of an evaluation, and what it takes."""

    layout: ExecutionPlan
    """Stages, groups of ranks, and tiers of the weights; its memory is that of the evaluation."""
    rows: SetPlan
    """Cuts, time and memory of the sequences that are evaluated."""


def plan_evaluation(
    run: RunConfig,
    *,
    hardware: HardwareSpec,
    lengths: Sequence[int],
    room_bytes: int,
    host_bytes: int = 0,
) -> EvaluationPlan:
    """Return the plan of an evaluation with the degrees of a run.

    If it does not fit, and the run leaves that open, each rank gets several stages, one after
    another, as in the looped order: K and V of one stage at a time are on the device. If that is
    not enough, the weights of a GPU are streamed from host memory.

    Args:
        run: Validated run configuration.
        hardware: Description of the machine.
        lengths: Tokens of each sequence, or sample, that is evaluated.
        room_bytes: Free memory of one device.
        host_bytes: Host memory of one device of a GPU; 0 on a CPU.

    Raises:
        ValueError: The degrees do not fit the model.
        MemoryError: The evaluation does not fit; the message says what would.
    """
    nearest: tuple[SetPlanner, SetPlan] | None = None
    for attempt in _layout_runs(run, hardware=hardware):
        layout = plan_without_limits(attempt, hardware=hardware)
        alone = [_weights_alone(rank) for rank in state_memory(layout.candidate())]
        planner = SetPlanner(run, step=layout.candidate(), training=alone)
        rows = planner.plan("data", lengths, room_bytes=room_bytes)
        in_host = max(rank.tier_weights_bytes for rank in alone)
        if layout.state.weights == "host" and in_host > host_bytes:
            continue
        if rows.peak_bytes <= room_bytes:
            memory = [replace(one, device=own) for one, own in zip(alone, rows.memory, strict=True)]
            stages = tuple(
                replace(stage, memory=memory[number % len(memory)])
                for number, stage in enumerate(layout.stages)
            )
            return EvaluationPlan(replace(layout, stages=stages), rows)
        if nearest is None or rows.peak_bytes < nearest[1].peak_bytes:
            nearest = planner, rows
    assert nearest is not None, "the first layout has its weights on the device, or as asked"
    planner, rows = nearest
    longest = planner.longest(rows, room_bytes=room_bytes)
    shorter = f"sequence.length={longest} fits here, or " if longest else ""
    raise MemoryError(
        f"evaluating: {rows.too_large(room_bytes)}: {shorter}evaluate on more devices"
    )


def _weights_alone(rank: StageMemory) -> StageMemory:
    """Return the memory of a rank without gradients and optimizer states."""
    return replace(
        rank,
        device=replace(rank.device, gradients_bytes=0, optimizer_bytes=0),
        tier_gradients_bytes=0,
        host_optimizer_bytes=0,
        background_save_bytes=0,
    )


def _layout_runs(run: RunConfig, *, hardware: HardwareSpec) -> Iterator[RunConfig]:
    """Yield runs of the stream whose plans have the layouts that an evaluation may have.

    Nothing is saved and nothing is updated: only the weights may be in another tier.
    """
    parallel, layers = run.parallel, run.model.num_layers
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
    leaves = run.state.weights in ("host", "disk")
    states = [run.state if leaves else StateConfig()]
    if run.state.weights == "auto" and hardware.device.kind == "cuda":
        states.append(StateConfig(weights="host", gradients="host", optimizer="host"))
    most = layers // parallel.pipeline_parallel_degree
    may_loop = parallel.virtual_stages == "auto" and parallel.schedule in ("auto", LOOPED)
    loops = [1 << power for power in range(1, most.bit_length())] if may_loop else []
    for state in states:
        base = longest.with_values(changed).model_copy(update={"activations": kept, "state": state})
        yield base
        for stages in loops:
            yield base.with_values({"parallel.virtual_stages": stages, "parallel.schedule": LOOPED})
