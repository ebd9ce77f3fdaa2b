"""Run configuration completed with the degrees that the solver chooses.

The commands that plan and train a run all take the degrees that it leaves out from here.
"""

from __future__ import annotations

from collections.abc import Callable

from sppo.config.run import RunConfig
from sppo.hardware.description import HardwareSpec
from sppo.planning.corpus.search import DrawnSteps, solve_corpus
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.search.division import Rejection
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.solver import solve

Draw = Callable[[RunConfig], DrawnSteps | None]
"""Draws steps of a run of documents; returns None if there is no data to draw from."""


def with_chosen_degrees(
    run: RunConfig, *, hardware: HardwareSpec, draw: Draw | None = None
) -> tuple[RunConfig, tuple[str, ...]]:
    """Return `run` with the degrees that it leaves out as `solve` recommends them.

    If nothing fits, these are the degrees that lack least memory. A run of documents becomes one of
    its longest samples; without drawn steps, its degrees are the best for these.

    Args:
        run: Validated run configuration.
        hardware: Machine to divide.
        draw: Draws the steps for which to choose the degrees of a run of documents.

    Returns:
        The run with all degrees, and the names of the keys that the solver chose. If it chose
        degrees, it also chose the schedule, N and the number of virtual stages where these were
        open.

    Raises:
        ValueError: The run asks for something that the machine or the model cannot do.
    """
    longest = run_of_longest_samples(run)
    if not run.parallel.open_degrees or hardware.num_devices == 1:
        return longest, ()
    steps = draw(run) if draw is not None and run.data.samples == "documents" else None
    if steps is not None:
        best = solve_corpus(run, hardware=hardware, steps=steps).best
        if best is not None:
            return _as_found(run, best.longest)
    solution = solve(longest, hardware=hardware)
    found = solution.best or solution.nearest
    return (longest, ()) if found is None else _as_found(run, found)


def _as_found(
    run: RunConfig, found: EvaluatedCandidate | Rejection
) -> tuple[RunConfig, tuple[str, ...]]:
    """Return `run` with the solver's choice for the keys that it leaves open.

    Args:
        run: The request.
        found: Best candidate, or the rejection nearest to fitting, whose schedule stays open.
    """
    candidate, parallel, sequence = found.candidate, run.parallel, run.sequence
    assert candidate is not None, "rejections without a candidate are not for memory"
    chosen: dict[str, object] = {
        f"parallel.{name}": found.degrees.by_name[name] for name in parallel.open_degrees
    }
    if candidate.virtual_stages > 1 and parallel.virtual_stages == "auto":
        chosen["parallel.virtual_stages"] = candidate.virtual_stages
    if isinstance(found, EvaluatedCandidate) and parallel.schedule == "auto":
        chosen["parallel.schedule"] = candidate.schedule
    if sequence.num_subsequences == "auto" and sequence.boundaries is None:
        chosen["sequence.num_subsequences"] = len(candidate.lengths)
    return run_of_longest_samples(run.with_values(chosen)), tuple(chosen)
