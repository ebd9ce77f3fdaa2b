"""A run file as something to simulate: its schedule, and its costs on a machine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sppo.config.run import RunConfig
from sppo.planning.cost import CostRequest, analytic_costs, hiding_ratios
from sppo.planning.hardware import HardwareSpec, hardware_for
from sppo.planning.partition import lengths_of
from sppo.planning.resolve import sequence_boundaries
from sppo.schedule.costs import Costs, with_offload
from sppo.schedule.generators import WHOLE_SEQUENCES, generate
from sppo.schedule.prepare import Case, lower


@dataclass(frozen=True, slots=True)
class RunShape:
    """What flags replace in a run for a what-if; None keeps the run's own."""

    schedule: str | None = None
    num_ranks: int | None = None
    num_subsequences: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedRun:
    """The simulation of a run.

    Attributes:
        case: Its lowered schedule and costs.
        forward: Its forward alone.
        hardware: The machine it was priced for.
    """

    case: Case
    forward: Case
    hardware: HardwareSpec


def simulated_run(run: RunConfig, *, shape: RunShape | None = None) -> SimulatedRun:
    """What one step of one data-parallel replica of `run` does.

    Raises:
        ValueError: degrees or a schedule that do not fit the run, with what to change.
    """
    _check_priced(run)
    shape = shape or RunShape()
    hardware = hardware_for(run.hardware)
    name = shape.schedule or _schedule_name(run)
    request = _cost_request(run, shape=shape, hardware=hardware, name=name)
    costs = analytic_costs(request)
    forward = generate(
        name,
        num_ranks=request.num_ranks,
        lengths=request.lengths,
        forward_only=True,
        costs=costs,
    )
    forward_case = Case(lower(forward, costs=costs), costs)
    costs = _with_run_offload(run, costs=costs, request=request)
    schedule = generate(name, num_ranks=request.num_ranks, lengths=request.lengths, costs=costs)
    return SimulatedRun(Case(lower(schedule, costs=costs), costs), forward_case, hardware)


def _check_priced(run: RunConfig) -> None:
    """Refuse what has no costs yet rather than simulate something else in its place."""
    if run.activations.policy == "hybrid":
        raise ValueError(
            "activations.policy 'hybrid' is chosen by the planner, which this version does not "
            "have: simulate retain, keep_attention, recompute, offload_all or sppo"
        )
    if run.sequence.partition == "cost_model" and run.sequence.boundaries is None:
        raise ValueError(
            "sequence.partition 'cost_model' needs a measured machine description, which this "
            "version does not have: simulate flops or length"
        )


def _schedule_name(run: RunConfig) -> str:
    """The run's schedule; "auto" is the SPPO program, cut by MSP where the run asks for it."""
    if run.parallel.schedule != "auto":
        return run.parallel.schedule
    return "sppo_msp" if run.parallel.multiplexed == "on" else "sppo"


def _cost_request(
    run: RunConfig, *, shape: RunShape, hardware: HardwareSpec, name: str
) -> CostRequest:
    replicas = run.parallel.data_parallel_degree
    sequences, rest = divmod(run.train.sequences_per_step, replicas)
    if rest:
        raise ValueError(
            f"train.sequences_per_step {run.train.sequences_per_step} on "
            f"{replicas} data-parallel replicas: must be a multiple of the replicas"
        )
    if shape.num_subsequences is not None:
        cut = run.sequence.model_copy(
            update={"num_subsequences": shape.num_subsequences, "boundaries": None}
        )
        run = run.model_copy(update={"sequence": cut})
    device = "cpu" if hardware.host_memory_bytes == 0 else "cuda"
    lengths = lengths_of(sequence_boundaries(run, device=device))
    if name in WHOLE_SEQUENCES:
        lengths = (sum(lengths),)
    policy = run.activations.policy
    return CostRequest(
        run.model,
        hardware,
        (lengths,) * sequences,
        num_ranks=shape.num_ranks or run.parallel.pipeline_parallel_degree,
        policy=policy if policy in ("keep_attention", "recompute") else "retain",
        dtype=run.train.dtype,
        sequence_parallel_degree=run.parallel.sequence_parallel_degree,
        data_parallel_degree=replicas,
    )


def _with_run_offload(run: RunConfig, *, costs: Costs, request: CostRequest) -> Costs:
    """`costs` with what the run's activation policy sends away."""
    given = run.activations.offload_ratio
    if given != "auto":
        ratios = np.full(costs.activation_bytes.shape, float(given))
    elif run.activations.policy == "offload_all":
        ratios = np.ones(costs.activation_bytes.shape)
    elif run.activations.policy == "sppo":
        counts = [len(parts) for parts in request.lengths]
        ratios = hiding_ratios(costs, num_subsequences=counts)
    else:
        return costs
    return with_offload(costs, ratios=ratios, copies=costs.copies)
