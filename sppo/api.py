"""Planning in the Python interface: solve, estimate, simulate, and plans as files. Needs no torch.

The examples plan for a machine preset, so they need neither the data nor that machine.
"""

from __future__ import annotations

from pathlib import Path

from sppo.config.run import RunConfig
from sppo.config.run_warnings import log_run_warnings
from sppo.data.samples.step_lengths import drawn_steps, drawn_steps_if_there
from sppo.hardware.run_hardware import run_hardware
from sppo.output_file import check_output_files, write_json
from sppo.planning.chosen_run import with_chosen_degrees
from sppo.planning.corpus.search import CorpusSolution, plan_of_longest, solve_corpus
from sppo.planning.estimate import Estimate
from sppo.planning.estimate import estimate as estimate_run
from sppo.planning.make_plan import make_plan
from sppo.planning.plan import ExecutionPlan, plan_json, read_plan
from sppo.planning.search.solver import Solution
from sppo.planning.search.solver import solve as solve_stream
from sppo.planning.simulated_run import simulated_plan, simulated_run
from sppo.planning.why_nothing_fits import nothing_fits
from sppo.schedule.program import gc_disabled
from sppo.schedule.simulation.simulate import simulate as play
from sppo.schedule.timeline import Timeline


def find_solution(run: RunConfig, *, lengths: str | None = None) -> Solution | CorpusSolution:
    """Return the answer of the solver to a request, with the runners-up and what does not work.

    Args:
        run: Validated run configuration, see :func:`solve`.
        lengths: Name of a distribution of lengths of samples; None draws from ``data.tokens``.

    Raises:
        NothingFitsError: No plan fits.
        ValueError: The run asks for something that the machine or the model cannot do.
    """
    log_run_warnings(run)
    hardware = run_hardware(run)
    solution: Solution | CorpusSolution
    if run.data.samples == "documents":
        steps = drawn_steps(run, distribution=lengths)
        solution = solve_corpus(run, hardware=hardware, steps=steps)
    elif lengths is None:
        solution = solve_stream(run, hardware=hardware)
    else:
        raise ValueError("lengths: only of data.samples=documents, and this run has the stream")
    if solution.best is None:
        raise nothing_fits(solution)
    return solution


def plan_of(solution: Solution | CorpusSolution) -> ExecutionPlan:
    """Return the plan of the best candidate, for samples that of a step of the longest."""
    if isinstance(solution, CorpusSolution):
        return plan_of_longest(solution)
    assert solution.best is not None, "find_solution raises if nothing fits"
    with gc_disabled():
        return make_plan(solution.run, solution.best)


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
    return plan_of(find_solution(run, lengths=lengths))


def estimate(run: RunConfig) -> Estimate:
    """Return the predicted memory of `run` by bucket, whether it fits or not; nothing is run.

    ``.evaluated.memory`` has the memory of each stage; ``.evaluated.shortfall`` says which memory
    is short, or is None.

    Raises:
        ValueError: The run asks for something that the machine or the model cannot do.
    """
    log_run_warnings(run)
    return estimate_run(run, hardware=run_hardware(run), draw=drawn_steps_if_there)


def simulate(what: RunConfig | ExecutionPlan) -> Timeline:
    """Return the simulated timeline of one step of a plan, or of the plan that a run would get.

    Returns:
        Actions of each pipeline rank of one replica over time: ``.makespan_s``,
        ``.bubble_fraction`` and ``.ranks`` with actions, waits and memory.

    Raises:
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
        ValueError: No file can be written there, e.g. in a directory that does not exist.
        OSError: A full disk.
    """
    check_output_files({"sppo.save_plan: path": Path(path)})
    write_json(Path(path), plan_json(plan))


def load_plan(path: Path | str) -> ExecutionPlan:
    """Return the plan in a file.

    Raises:
        ValueError: The file is not a plan, has another version, or was changed.
        OSError: The file cannot be read.
    """
    return read_plan(Path(path))
