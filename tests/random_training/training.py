"""Run of a whole case, leg by leg, and the list of its faults."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.random_training.case import Case
from tests.random_training.emulated_ranks import run_emulated
from tests.random_training.oracle import first_state, step_faults
from tests.random_training.run_leg import StepResult, run_leg
from tests.ranks import RankPool

_MEMORY = "/dev/shm"
"""Where a disk tier lies if there is such a place: a thousand cases need not wait for a disk."""
RunRanks = Callable[..., list[Any]]
"""``run(function, *arguments, ranks=n)`` calls ``function(rank, *arguments)`` on each rank."""


def emulated(case: Case) -> RunRanks:
    """Runs the ranks of ``case`` as threads of this process."""

    def run(function: Callable[..., Any], *arguments: Any, ranks: int) -> list[Any]:
        return run_emulated(function, *arguments, ranks=ranks, seed=case.seed)

    return run


def results_of(case: Case, *, disk: str = "") -> list[list[StepResult]]:
    """What each rank has of each step of the first leg.

    Args:
        case: to run.
        disk: directory of a disk tier.
    """
    ranks = case.legs[0].num_ranks
    return emulated(case)(run_leg, case, 0, first_state(case), disk, ranks=ranks)


def faults_of(case: Case, pool: RankPool | None = None) -> list[str]:
    """What is wrong about ``case``: one line for each fault of the first step that has any.

    Args:
        case: to run.
        pool: of processes that are the ranks; None emulates them here.
    """
    run = emulated(case) if pool is None else pool.run
    state = first_state(case)
    in_memory = _MEMORY if Path(_MEMORY).is_dir() else None
    with tempfile.TemporaryDirectory(prefix="random-training-", dir=in_memory) as disk:
        for number, leg in enumerate(case.legs):
            try:
                answers = run(run_leg, case, number, state, disk, ranks=leg.num_ranks)
            except Exception as error:
                notes = "; ".join(getattr(error, "__notes__", []))
                return [f"leg {number}: {type(error).__name__}: {error} {notes}".strip()]
            for step in range(leg.steps):
                of_step = [answer[step] for answer in answers]
                faults, state = step_faults(case, number, step, before=state, ranks=of_step)
                if faults:
                    return [f"leg {number}, step {step}: {fault}" for fault in faults]
    return []
