"""Print the time of the solver: python -m tests.planning.solve_seconds."""

from __future__ import annotations

from collections.abc import Callable
from time import process_time
from typing import TypeVar

from sppo.planning.improvements import improvements
from sppo.planning.make_plan import make_plan
from sppo.planning.plan import plan_json
from tests.planning.cases import run_config, solved

REQUESTS = (
    ("gpt-7b", "1Mi", 4),
    ("gpt-7b", "4Mi", 16),
    ("gpt-65b", "4Mi", 128),
    ("llama-3.1-70b", "4Mi", 128),
)
"""Model, length, nodes of eight A100-80GB."""
_Result = TypeVar("_Result")


def timed(work: Callable[[], _Result]) -> tuple[_Result, str]:
    """Do some work; return what comes of it, and its processor seconds."""
    begin = process_time()
    result = work()
    return result, f"{process_time() - begin:.2f} s"


def main() -> None:
    """A line for each request: seconds of search, changes and plan; degrees, N, predicted step."""
    for model, length, nodes in REQUESTS:
        hardware = {"preset": "a100-80g", "nodes": nodes}
        run = run_config(model, length=length, hardware=hardware)
        solution, search_s = timed(lambda run=run: solved(run))
        best = solution.best
        if best is None:
            print(f"{model} {length} on {8 * nodes}: {search_s} to nothing that fits")
            continue
        _, changes_s = timed(lambda solution=solution: improvements(solution))
        _, plan_s = timed(lambda run=run, best=best: plan_json(make_plan(run, best)))
        print(
            f"{model} {length} on {8 * nodes}: search {search_s}, changes {changes_s}, plan "
            f"{plan_s}: {best.degrees}, N {len(best.candidate.lengths)}, {best.step_s:.1f} s a step"
        )


if __name__ == "__main__":
    main()
