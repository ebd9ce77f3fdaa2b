"""Plan of one replica for one step of samples: division over replicas, packing and prediction."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import lru_cache

from sppo.planning.elastic.step_correction import NO_CORRECTION, StepCorrection
from sppo.planning.elastic.step_plan import StepPlan, StepPlanner
from sppo.planning.elastic.step_prediction import StepPrediction, predict_step


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
    """Division of a step over replicas, and the plan of one replica.

    Attributes:
        replicas: Samples of each replica, as indices among the samples of the step.
        plan: Plan of one replica.
        prediction: Predicted seconds of `plan`.
    """

    replicas: tuple[tuple[int, ...], ...]
    plan: StepPlan
    prediction: StepPrediction


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
    return ReplicaPlan(replicas, plan, predict_step(plan, request.correction))


def plan_pickled(planner: bytes, request: StepRequest, *, replica: int) -> ReplicaPlan:
    """Call :func:`plan_replica` with a pickled planner, which each process unpickles once."""
    return plan_replica(_unpickled(planner), request, replica=replica)


@lru_cache(maxsize=1)
def _unpickled(planner: bytes) -> StepPlanner:
    """Return the unpickled planner, the same object in every step, so its caches stay valid."""
    found = pickle.loads(planner)
    assert isinstance(found, StepPlanner), f"a {type(found).__name__} is no planner"
    return found
