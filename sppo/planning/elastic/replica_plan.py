"""Plan of one replica for one step of samples: those it is given, and how they run."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import lru_cache

from sppo.planning.elastic.step_correction import NO_CORRECTION, StepCorrection
from sppo.planning.elastic.step_plan import StepPlan, StepPlanner
from sppo.planning.elastic.step_prediction import StepPrediction, predict_step


@dataclass(frozen=True, slots=True)
class StepRequest:
    """Lengths and corrections that a plan of a step is made from, beside the planner of the run.

    Attributes:
        lengths: Tokens of each sample of the step, of all replicas.
        correction: By what earlier steps took.
        corrects_plan: Whether the plan is made with it, too; else the prediction alone.
    """

    lengths: tuple[int, ...]
    correction: StepCorrection = NO_CORRECTION
    corrects_plan: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaPlan:
    """The division of a step over replicas, and the plan of one of them.

    Attributes:
        replicas: Samples of each replica, by their places among those of the step.
        plan: Of one replica.
        prediction: What that takes.
    """

    replicas: tuple[tuple[int, ...], ...]
    plan: StepPlan
    prediction: StepPrediction


def plan_replica(planner: StepPlanner, request: StepRequest, *, replica: int) -> ReplicaPlan:
    """Divide the samples of a step, and plan those of one replica; a function of its arguments.

    Program and digest are made, too, so that a process that plans ahead leaves nothing to do.

    Args:
        planner: of the run.
        request: the step.
        replica: which one.

    Raises:
        MemoryError: no plan fits.
        ValueError: a replica would have no samples.
    """
    if request.corrects_plan:
        planner = planner.corrected(request.correction.compute)
    replicas = planner.divided(request.lengths)
    plan = planner.plan([request.lengths[index] for index in replicas[replica]])
    assert plan.digest, "a plan has a program, and both have a digest"
    return ReplicaPlan(replicas, plan, predict_step(plan, request.correction))


def plan_pickled(planner: bytes, request: StepRequest, *, replica: int) -> ReplicaPlan:
    """Return :func:`plan_replica` of a pickled planner, which a process unpickles once."""
    return plan_replica(_unpickled(planner), request, replica=replica)


@lru_cache(maxsize=1)
def _unpickled(planner: bytes) -> StepPlanner:
    """Return the planner: what is cached by its objects is then found again in the next step."""
    found = pickle.loads(planner)
    assert isinstance(found, StepPlanner), f"a {type(found).__name__} is no planner"
    return found
