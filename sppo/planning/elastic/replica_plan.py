"""Plan of one replica for one step of samples: division over replicas, packing and prediction."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from functools import lru_cache

from sppo.cost.layer import UNCORRECTED, CostCorrection
from sppo.planning.elastic.step_correction import NO_CORRECTION, StepCorrection
from sppo.planning.elastic.step_plan import StepPlan, StepPlanner
from sppo.planning.make_plan import compute_seconds
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.schedule.costs import Costs


@dataclass(frozen=True, slots=True)
class StepRequest:
    """Input of a step's plan in addition to the planner of the run.

    Attributes:
        lengths: Tokens of each sample of the step, of all replicas.
        correction: Correction of the prediction, from measured times of earlier steps.
        corrects_plan: Whether `correction` also applies to the plan, not only to its prediction.
    """

    lengths: tuple[int, ...]
    correction: StepCorrection = NO_CORRECTION
    corrects_plan: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaPlan:
    """Plan of one replica for one step, and its predicted seconds.

    Attributes:
        plan: Plan of the replica.
        replicas: Samples of each replica, as indices among the samples of the step.
        correction: Correction of the prediction.
        step_s: Corrected seconds of the step.
        phases_s: Corrected seconds of forwards and of backwards of the busiest rank, and outside of
            the program.
        uncorrected_s: Uncorrected seconds of the step.
        uncorrected_actions_s: Uncorrected seconds from the first action of the program to the last.
        uncorrected: Uncorrected costs of the actions.
    """

    plan: StepPlan
    replicas: tuple[tuple[int, ...], ...]
    correction: StepCorrection
    step_s: float
    phases_s: tuple[float, float, float]
    uncorrected_s: float
    uncorrected_actions_s: float
    uncorrected: Costs


def plan_replica(planner: StepPlanner, request: StepRequest, *, replica: int) -> ReplicaPlan:
    """Divide the samples of a step over replicas, and plan one replica. Deterministic.

    The program and its digest are also computed, so that a process that plans ahead does all work.

    Args:
        planner: Planner of the run.
        request: Samples and corrections of the step.
        replica: Index of the replica to plan.

    Raises:
        MemoryError: No plan fits.
        ValueError: There are fewer samples than replicas.
    """
    if request.corrects_plan:
        planner = planner.corrected(request.correction.compute)
    replicas = planner.divided(request.lengths)
    plan = planner.plan([request.lengths[index] for index in replicas[replica]])
    assert plan.digest, "a plan has a program, and both have a digest"
    return predict_step(plan, request.correction, replicas=replicas)


def predict_step(
    plan: StepPlan, correction: StepCorrection, *, replicas: tuple[tuple[int, ...], ...] = ()
) -> ReplicaPlan:
    """Return the prediction for a plan, which may have been made with another correction."""
    plain = _priced(plan.evaluated, UNCORRECTED)
    corrected = _priced(plan.evaluated, correction.compute)
    rest_s = plain.time.update_s if correction.rest_s is None else correction.rest_s
    return ReplicaPlan(
        plan,
        replicas,
        correction,
        step_s=_actions_s(corrected) * correction.waiting + rest_s,
        phases_s=(*compute_seconds(corrected), rest_s),
        uncorrected_s=plain.step_s,
        uncorrected_actions_s=_actions_s(plain),
        uncorrected=plain.costs,
    )


def _priced(evaluated: EvaluatedCandidate, correction: CostCorrection) -> EvaluatedCandidate:
    """Return the candidate priced with a correction, with its placement unchanged."""
    workload = evaluated.candidate.workload
    if workload.correction == correction:
        return evaluated
    candidate = replace(evaluated.candidate, workload=replace(workload, correction=correction))
    return replace(evaluated, candidate=candidate)


def _actions_s(evaluated: EvaluatedCandidate) -> float:
    return evaluated.step_s - evaluated.time.update_s


def plan_pickled(planner: bytes, request: StepRequest, *, replica: int) -> ReplicaPlan:
    """Call :func:`plan_replica` with a pickled planner, which each process unpickles once."""
    return plan_replica(_unpickled(planner), request, replica=replica)


@lru_cache(maxsize=1)
def _unpickled(planner: bytes) -> StepPlanner:
    """Return the unpickled planner, the same object in every step, so its caches stay valid."""
    found = pickle.loads(planner)
    assert isinstance(found, StepPlanner), f"a {type(found).__name__} is no planner"
    return found
