"""Planning in the Python interface: solve, estimate, simulate, and plans as files. Needs no torch.

The examples plan for a machine preset, so they need neither the data nor that machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sppo.config.run import RunConfig
from sppo.config.run_warnings import log_run_warnings
from sppo.hardware.run_hardware import hardware_line, run_hardware
from sppo.interface.arguments import PATH, check_argument
from sppo.output_file import check_output_files, write_json
from sppo.planning.plan import ExecutionPlan, plan_json, read_plan
from sppo.planning.search.solver import nearest_rejection
from sppo.schedule.timeline import Timeline
from sppo.units import format_bytes

if TYPE_CHECKING:
    from sppo.planning.advice import Advice
    from sppo.planning.estimate import Estimate
    from sppo.planning.search.solver import Solution


class NothingFitsError(MemoryError):
    """Request for which no plan fits into the memory of the machine.

    Attributes:
        changes: Changes of the request that would make it fit, the easiest first.
    """

    def __init__(self, message: str, changes: tuple[Advice, ...]) -> None:
        super().__init__(message)
        self.changes = changes


def solve(run: RunConfig, *, lengths: str | None = None) -> ExecutionPlan:
    """Return the fastest plan for `run` that fits into memory.

    The plan has degrees, cuts, schedule, placement of activations and predicted memory. Keys in the
    run are constraints; keys that are left out are chosen here. With ``data.samples=documents``,
    the degrees are those with which steps drawn from ``data.tokens`` are fastest, and the returned
    plan is for a step of the longest samples; training plans each step once its samples are known.

    Args:
        run: Run configuration from :func:`sppo.load_run`. Its ``hardware`` is the machine to plan
            for, by default this machine.
        lengths: With ``data.samples=documents``, name of a published distribution to draw lengths
            from instead, such as "github".

    Raises:
        TypeError: ``run`` or ``lengths`` has another type, e.g. a path.
        NothingFitsError: No plan fits; the message says which memory is short and what would fit.
        ValueError: The run asks for something that the machine or the model cannot do.

    >>> import sppo
    >>> run = sppo.load_run(
    ...     {
    ...         "model": {"preset": "gpt-7b"},
    ...         "data": {"tokens": "data"},
    ...         "sequence": {"length": "512Ki"},
    ...         "parallel": {"sequence_parallel_degree": 8, "pipeline_parallel_degree": 4},
    ...         "hardware": {"preset": "a100-80g", "nodes": 4},
    ...     }
    ... )
    >>> plan = sppo.solve(run)
    >>> plan.sequence_parallel_degree, plan.pipeline_parallel_degree
    (8, 4)
    >>> plan.predicted.device_peak_bytes < 80 * 2**30
    True
    """
    from sppo.planning.make_plan import make_plan
    from sppo.planning.search.solver import solve as search

    check_argument("sppo.solve", "run", run, RunConfig)
    check_argument("sppo.solve", "lengths", lengths, str, None)
    log_run_warnings(run)
    if run.data.samples == "documents":
        return _solve_corpus(run, lengths)
    if lengths is not None:
        raise ValueError("lengths: only of data.samples=documents, and this run has the stream")
    solution = search(run, hardware=run_hardware(run))
    if solution.best is None:
        raise _nothing_fits(solution)
    return make_plan(solution.run, solution.best)


def estimate(run: RunConfig) -> Estimate:
    """Return the predicted memory of `run` by bucket, whether it fits or not; nothing is run.

    ``.evaluated.memory`` has the memory of each stage; ``.evaluated.shortfall`` says which memory
    is short, or is None.

    Raises:
        TypeError: ``run`` has another type, e.g. a path.
        ValueError: The run asks for something that the machine or the model cannot do.
    """
    from sppo.data.samples.step_lengths import drawn_steps_if_there
    from sppo.planning.estimate import estimate as estimate_run

    check_argument("sppo.estimate", "run", run, RunConfig)
    log_run_warnings(run)
    return estimate_run(run, hardware=run_hardware(run), draw=drawn_steps_if_there)


def simulate(what: RunConfig | ExecutionPlan) -> Timeline:
    """Return the simulated timeline of one step of a plan, or of the plan that a run would get.

    Returns:
        Actions of each pipeline rank of one replica over time: ``.makespan_s``,
        ``.bubble_fraction`` and ``.ranks`` with actions, waits and memory.

    Raises:
        TypeError: ``what`` is neither a run nor a plan.
        ValueError: Degrees or schedule do not fit the run.

    >>> import sppo
    >>> run = sppo.load_run(
    ...     {
    ...         "model": {"preset": "tiny"},
    ...         "data": {"tokens": "data"},
    ...         "sequence": {"length": "16Ki", "num_subsequences": 8},
    ...         "parallel": {"pipeline_parallel_degree": 2, "schedule": "seq1f1b"},
    ...         "hardware": {"preset": "laptop-cpu", "nodes": 2},
    ...     }
    ... )
    >>> timeline = sppo.simulate(run)
    >>> len(timeline.ranks), 0 < timeline.bubble_fraction < 0.5
    (2, True)
    """
    from sppo.data.samples.step_lengths import drawn_steps_if_there
    from sppo.planning.chosen_run import with_chosen_degrees
    from sppo.planning.simulated_run import simulated_plan, simulated_run
    from sppo.schedule.simulation.simulate import simulate as play

    check_argument("sppo.simulate", "what", what, RunConfig, ExecutionPlan)
    if isinstance(what, ExecutionPlan):
        case = simulated_plan(what).case
    else:
        log_run_warnings(what)
        hardware = run_hardware(what)
        whole = with_chosen_degrees(what, hardware=hardware, draw=drawn_steps_if_there)
        case = simulated_run(whole.run, hardware=hardware).case
    return play(case.schedule, costs=case.costs)


def save_plan(plan: ExecutionPlan, path: Path | str) -> None:
    """Write a plan as ``sppo solve -o`` does, for ``sppo train --plan`` and ``sppo simulate``.

    Raises:
        TypeError: ``plan`` or ``path`` has another type.
        ValueError: No file can be written there, e.g. in a directory that does not exist.
        OSError: A full disk.
    """
    check_argument("sppo.save_plan", "plan", plan, ExecutionPlan)
    check_argument("sppo.save_plan", "path", path, PATH)
    check_output_files({"sppo.save_plan: path": Path(path)})
    write_json(Path(path), plan_json(plan))


def load_plan(path: Path | str) -> ExecutionPlan:
    """Return the plan in a file.

    Raises:
        TypeError: ``path`` has another type.
        ValueError: The file is not a plan, has another version, or was changed.
        OSError: The file cannot be read.
    """
    check_argument("sppo.load_plan", "path", path, PATH)
    return read_plan(Path(path))


def _solve_corpus(run: RunConfig, lengths: str | None) -> ExecutionPlan:
    """Return the plan of the longest samples with the degrees that are best for drawn steps."""
    from sppo.data.samples.step_lengths import drawn_steps
    from sppo.planning.corpus.search import plan_of_longest, solve_corpus

    steps = drawn_steps(run, distribution=lengths)
    solution = solve_corpus(run, hardware=run_hardware(run), steps=steps)
    if solution.best is None:
        reasons = [refused.reason for refused in solution.refused]
        nearest = reasons[0] if reasons else "there is no way to divide it"
        where = hardware_line(solution.hardware)
        raise NothingFitsError(f"no plan fits {where}: {nearest}", ())
    return plan_of_longest(solution)


def _nothing_fits(solution: Solution) -> NothingFitsError:
    """Return the error that says which memory is short and what would fit."""
    from sppo.planning.advice import what_would_fit

    changes = what_would_fit(solution.run, hardware=solution.hardware, machine_of=run_hardware)
    nearest = nearest_rejection(solution.rejected)
    if nearest is not None and nearest.shortfall is not None:
        short = nearest.shortfall
        reason = (
            f"the nearest way is short by {format_bytes(short.short_bytes)} of {short.place} "
            f"memory on rank {short.rank} ({format_bytes(short.needed_bytes)} needed, "
            f"{format_bytes(short.available_bytes)} there)"
        )
    else:
        reason = (
            solution.rejected[0].reason if solution.rejected else "there is no way to divide it"
        )
    fixes = ", or ".join(change.change for change in changes)
    return NothingFitsError(
        f"no plan fits {hardware_line(solution.hardware)}: {reason}. "
        + (
            f"What would fit: {fixes}" if fixes else "No smaller change was found that makes it fit"
        ),
        changes,
    )
