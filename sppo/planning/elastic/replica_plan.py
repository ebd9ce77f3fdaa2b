"""What one replica runs in one step of samples: those it is given, and their plan."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from sppo.planning.elastic.step_plan import StepPlan, StepPlanner


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaPlan:
    """The division of a step over replicas, and the plan of one of them.

    Attributes:
        replicas: Samples of each replica, by their places among those of the step.
        plan: Of one replica.
    """

    replicas: tuple[tuple[int, ...], ...]
    plan: StepPlan


def plan_replica(planner: StepPlanner, lengths: Sequence[int], *, replica: int) -> ReplicaPlan:
    """Divide the samples of a step, and plan those of one replica; a function of its arguments.

    Program and digest are made, too, so that a process that plans ahead leaves nothing to do.

    Args:
        planner: of the run.
        lengths: tokens of each sample of the step, of all replicas.
        replica: which one.

    Raises:
        MemoryError: no plan fits.
        ValueError: a replica would have no samples.
    """
    replicas = planner.divided(lengths)
    plan = planner.plan([lengths[index] for index in replicas[replica]])
    assert plan.digest, "a plan has a program, and both have a digest"
    return ReplicaPlan(replicas, plan)


def plan_pickled(planner: bytes, lengths: Sequence[int], *, replica: int) -> ReplicaPlan:
    """Return :func:`plan_replica` of a pickled planner, which a process unpickles once."""
    return plan_replica(_unpickled(planner), lengths, replica=replica)


@lru_cache(maxsize=1)
def _unpickled(planner: bytes) -> StepPlanner:
    """Return the planner: what is cached by its objects is then found again in the next step."""
    found = pickle.loads(planner)
    assert isinstance(found, StepPlanner), f"a {type(found).__name__} is no planner"
    return found
