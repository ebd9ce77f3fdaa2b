"""Plans of the steps of a run of samples, each made while the step before runs.

Another process makes them, which knows nothing but the planner and the request: they are what this
process would plan itself. It does, when a step begins, wherever a plan is not there.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from sppo.parallel.job.worker_process import WorkerLostError, WorkerProcess
from sppo.planning.elastic.replica_plan import ReplicaPlan, StepRequest, plan_pickled, plan_replica
from sppo.planning.elastic.step_plan import StepPlanner

_PROCESSES = 2
"""Processes that are started, one after another, as they fail."""


@dataclass(frozen=True, slots=True, eq=False)
class TakenPlan:
    """The plan of a step, and how it was come by.

    Attributes:
        replica: Division of the step, and the plan of this replica.
        wait_s: Seconds that the step waited for it; 0 where it was there.
        note: What is to be told of how it was made; "" where nothing went wrong.
    """

    replica: ReplicaPlan
    wait_s: float
    note: str = ""


class _NotThereError(Exception):
    """The other process has no plan; says why, or "" where none was asked for."""


class StepPlans:
    """Gives one replica the plan of each step; close it at the end of the run.

    Args:
        planner: of the run.
        replica: whose plans are taken.
        ahead: whether another process makes them while steps run.
        limit_s: how long a step waits for that process.
        any_rank: whether what it is given is true on any rank; all ranks call it together.
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
        """Failure since the last plan was taken, as text; "" without one."""

    def begin(self, request: StepRequest) -> None:
        """Have the other process plan a step."""
        if self._worker is None:
            return
        try:
            future = self._worker.submit(
                plan_pickled, self._pickled, request, replica=self._replica
            )
            self._begun = request, future
        except WorkerLostError as error:
            self._note = self._failed(str(error))

    def take(self, request: StepRequest) -> TakenPlan:
        """Return the plan of a step, the same as without a process.

        Where that is too slow on any rank, all ranks plan by a smaller search instead.

        Raises:
            MemoryError: no plan fits.
        """
        start = time.perf_counter()
        found, late, waited = None, False, True
        try:
            found, waited = self._found(request)
        except TimeoutError:
            late = True
            self._note = (
                f"its plan was not there after {self._limit_s:g} s (planning.limit_s), so it "
                "is planned by a smaller search"
            )
        except _NotThereError as why:
            self._note = self._note or str(why)
        plan = partial(plan_replica, request=request, replica=self._replica)
        if late:
            self._stop()
        if self._ahead and self._any_rank(late):
            found, waited = plan(replace(self._planner, quick=True)), True
        elif found is None:
            found = plan(self._planner)
        note, self._note = self._note, ""
        return TakenPlan(found, time.perf_counter() - start if waited else 0.0, note)

    def close(self) -> None:
        """End the other process."""
        self._stop()
        self._worker = None

    def _found(self, request: StepRequest) -> tuple[ReplicaPlan, bool]:
        """Return the plan that was begun, and whether it had to be waited for.

        Raises:
            TimeoutError: it takes too long.
            _NotThereError: there is none.
        """
        begun, self._begun = self._begun, None
        if begun is None or begun[0] != request:
            raise _NotThereError
        assert self._worker is not None, "what was begun has a process"
        future = begun[1]
        is_there = future.done()
        try:
            return self._worker.result(future, timeout_s=self._limit_s), not is_there
        except TimeoutError:
            raise
        except MemoryError:  # does not fit: planned once more here, which says so
            raise _NotThereError from None
        except WorkerLostError as error:
            raise _NotThereError(self._failed(str(error))) from error
        except Exception as error:  # of whatever kind: it is planned here as well
            how = f"failed ({type(error).__name__}: {error})"
            raise _NotThereError(self._failed(how)) from error

    def _failed(self, how: str) -> str:
        """Give the process up, and say how it failed and what follows."""
        self._failures += 1
        self._stop()
        if self._failures == _PROCESSES:
            self._worker = None
        then = "another one is started" if self._worker is not None else "so is every other step"
        return (
            f"the process that plans ahead {how}: this step is planned when it begins, and {then}"
        )

    def _stop(self) -> None:
        self._begun = None
        if self._worker is not None:
            self._worker.close()
