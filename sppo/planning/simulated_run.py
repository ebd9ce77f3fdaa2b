"""Schedule and costs of a run file or a plan, for the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sppo.config.run import RunConfig
from sppo.cost.candidate import Candidate
from sppo.cost.memory.stage_memory import StageMemory
from sppo.cost.memory.tier_memory import most_tier_bytes, node_host_bytes
from sppo.hardware.description import HardwareSpec
from sppo.planning.plan import ExecutionPlan
from sppo.planning.run_plan import evaluate_in_nearest_tiers, run_candidate
from sppo.planning.search.evaluated_candidate import steady_bytes
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.planning.search.executed_candidate import as_executed
from sppo.schedule.costs import Costs
from sppo.schedule.orders.names import WHOLE_SEQUENCES, WITH_VIRTUAL_STAGES
from sppo.schedule.program import Case


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedRun:
    """Input of the simulator for one step of a run.

    Attributes:
        case: Program and costs of the step.
        forward: Program of the forwards alone, and the same costs.
        hardware: Description of the machine that the run was priced for.
        num_devices: Number of devices of all replicas.
        steady_bytes: Bytes that one device of each pipeline rank holds throughout the step.
        host_peak_bytes: Peak bytes of host memory of the device that uses most of it.
        node_host_bytes: Peak bytes of host memory of all devices of one node together.
    """

    case: Case
    forward: Case
    hardware: HardwareSpec
    num_devices: int
    steady_bytes: tuple[int, ...]
    host_peak_bytes: int
    node_host_bytes: int


def simulated_run(
    run: RunConfig, *, hardware: HardwareSpec, schedule: str | None = None
) -> SimulatedRun:
    """Return the program and costs of one step of one data-parallel replica of `run`.

    Args:
        run: Run configuration with all degrees written.
        hardware: Machine to price the step for.
        schedule: Name of a schedule to simulate instead of the run's own.

    Raises:
        ValueError: Degrees or schedule do not suit the run; the message says what to change.
    """
    if schedule is None:
        evaluated = as_executed(evaluate_in_nearest_tiers(run, hardware=hardware))
    else:
        candidate = run_candidate(run, hardware=hardware)
        virtual = candidate.virtual_stages if schedule in WITH_VIRTUAL_STAGES else 1
        candidate = replace(candidate, schedule=schedule, virtual_stages=virtual)
        if schedule in WHOLE_SEQUENCES:
            candidate = replace(candidate, lengths=(sum(candidate.lengths),))
        evaluated = evaluate_candidate(candidate)
    candidate = evaluated.candidate
    return _simulated(candidate, costs=evaluated.costs, memory=evaluated.memory)


def simulated_plan(plan: ExecutionPlan) -> SimulatedRun:
    """Return the program and costs of one step of one data-parallel replica under `plan`."""
    return _simulated(plan.candidate(), costs=plan.costs(), memory=plan.rank_memory)


def _simulated(
    candidate: Candidate, *, costs: Costs, memory: Sequence[StageMemory]
) -> SimulatedRun:
    case, forward = (
        Case(candidate.program(costs, forward_only=forward_only), costs)
        for forward_only in (False, True)
    )
    return SimulatedRun(
        case,
        forward,
        candidate.workload.hardware,
        candidate.num_devices,
        tuple(steady_bytes(held.device) for held in memory),
        most_tier_bytes(memory, "host", candidate=candidate),
        node_host_bytes(memory, candidate=candidate),
    )
