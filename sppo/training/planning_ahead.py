"""Planning of steps of samples in another process, while the step before runs.

The other process gets only the planner and the request, so its plan equals the one that this
process would make. If there is no plan when a step begins, this process makes it.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from sppo.parallel.job.worker_process import WorkerLostError, WorkerProcess
from sppo.planning.elastic.replica_plan import ReplicaPlan, StepRequest, plan_pickled, plan_replica
from sppo.planning.elastic.step_plan import StepPlanner

_PROCESSES = 2
"""Number of failed processes after which no other is started."""


@dataclass(frozen=True, slots=True, eq=False)
class TakenPlan:
    """Plan of a step, with the time that the step waited for planning."""

    replica: ReplicaPlan
    """Division of the samples over replicas, and the plan of this replica."""
    wait_s: float
    """Seconds that the step waited for the plan; 0 if it was ready."""
    note: str = ""
    """Message on a failure of planning ahead; "" if none."""


class StepPlans:
    """Source of the plans of one replica's steps; must be closed at the end of the run.

    Args:
        planner: Planner of the run's steps.
        replica: Index of the replica.
        ahead: Whether another process makes plans while steps run.
        limit_s: Longest time in seconds that a step waits for that process.
        any_rank: Returns whether its argument is true on any rank. Collective.
    """

    def __init__(
        self,
        planner: StepPlanner,
        *,
        replica: int,
        ahead: bool,
        limit_s: float,
        any_rank: Callable[[bool], bool],
    ) -> None:
        self._planner, self._replica = planner, replica
        self._pickled = pickle.dumps(planner)
        self._limit_s, self._any_rank = limit_s, any_rank
        self._ahead = ahead
        self._worker = WorkerProcess() if ahead else None
        self._failures = 0
        self._begun: tuple[StepRequest, Future[ReplicaPlan]] | None = None
        self._note = ""
        """Message on a failure since the last plan was taken; "" if none."""

    def begin(self, request: StepRequest) -> None:
        """Submit a step to the planning process; does nothing without one."""
        if self._worker is None:
            return
        try:
            future = self._worker.submit(
                plan_pickled, self._pickled, request, replica=self._replica
            )
            self._begun = request, future
        except WorkerLostError as error:
            self._failed(str(error))

    def take(self, request: StepRequest) -> TakenPlan:
        """Return the plan of a step, equal to one made without a planning process.

        If planning exceeds the limit on any rank, all ranks plan by a smaller search instead.

        Raises:
            MemoryError: No plan fits.
        """
        start, late, found = time.perf_counter(), False, None
        begun, self._begun = self._begun, None
        was_there = begun is not None and begun[0] == request and begun[1].done()
        if begun is not None and begun[0] == request:
            try:
                found = self._result(begun[1])
            except TimeoutError:
                late = True
                self._stop()
                self._note = (
                    f"its plan was not there after {self._limit_s:g} s (planning.limit_s), so it "
                    "is planned by a smaller search"
                )
        planner = self._planner
        if self._ahead and self._any_rank(late):
            planner, found = replace(planner, quick=True), None
        waited = found is None or not was_there
        if found is None:
            found = plan_replica(planner, request, replica=self._replica)
        note, self._note = self._note, ""
        return TakenPlan(found, time.perf_counter() - start if waited else 0.0, note)

    def _result(self, future: Future[ReplicaPlan]) -> ReplicaPlan | None:
        """Return the plan from the other process; None if that process failed.

        Raises:
            TimeoutError: The plan was not ready within the limit.
        """
        assert self._worker is not None, "what was begun has a process"
        try:
            return self._worker.result(future, timeout_s=self._limit_s)
        except TimeoutError:
            raise
        except MemoryError:  # does not fit: planning here raises it again
            return None
        except WorkerLostError as error:
            self._failed(str(error))
        except Exception as error:  # of any kind: the step is planned here
            self._failed(f"failed ({type(error).__name__}: {error})")
        return None

    def _failed(self, how: str) -> None:
        """Close the failed process, and note the failure and its consequence."""
        self._failures += 1
        self._stop()
        if self._failures == _PROCESSES:
            self._worker = None
        then = "another one is started" if self._worker is not None else "so is every other step"
        self._note = (
            f"the process that plans ahead {how}: this step is planned when it begins, and {then}"
        )

    def _stop(self) -> None:
        self._begun = None
        if self._worker is not None:
            self._worker.close()

    def close(self) -> None:
        """End the planning process."""
        self._stop()
        self._worker = None
