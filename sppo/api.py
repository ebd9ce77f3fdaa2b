"""What the command line and ``import sppo`` call: solve, estimate, simulate, train, evaluate.

Planning needs no torch; it is imported when a run is trained or evaluated.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from sppo.config import RunConfig, load_run, run_sections
from sppo.config.advice import log_run_warnings
from sppo.config.run import DEGREES
from sppo.cost.trainable import check_trainable
from sppo.data.evaluated_sets import evaluated_samples
from sppo.data.samples.label_share import with_label_share_if_there
from sppo.data.samples.step_lengths import drawn_steps, drawn_steps_if_there
from sppo.hardware.run_hardware import run_hardware
from sppo.output_file import check_output_files, write_json
from sppo.parallel.job.environment import rank_environment
from sppo.parallel.job.signals import STOP_CODES
from sppo.planning.chosen_run import with_chosen_degrees
from sppo.planning.corpus.search import CorpusSolution, plan_of_longest, solve_corpus
from sppo.planning.estimate import Estimate
from sppo.planning.estimate import estimate as estimate_run
from sppo.planning.make_plan import make_plan
from sppo.planning.plan import ExecutionPlan, plan_json, read_plan
from sppo.planning.run_plan import executed_candidate, in_schedule
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.solver import Solution
from sppo.planning.search.solver import solve as solve_stream
from sppo.planning.validation_plan import ValidationPlan, plan_validation
from sppo.planning.why_nothing_fits import nothing_fits
from sppo.schedule.simulation.simulate import simulate as play
from sppo.schedule.timeline import Timeline
from sppo.training.input_checks import EvaluatedWeights
from sppo.training.restarts import train_on_ranks
from sppo.training.start import (
    ReadyRun,
    evaluating_job,
    prepare_evaluation,
    prepare_run,
    train_as_rank,
)
from sppo.training.trained_run import RunFailedError, TrainedRun, trained_run

if TYPE_CHECKING:
    from sppo.training.evaluation.evaluated_run import Evaluation


RunSource = RunConfig | Mapping[str, Any] | Path | str
"""Run, or what :func:`sppo.load_run` reads: sections as a mapping, or the path of a run file."""


def _run_of(source: RunSource) -> RunConfig:
    """Return the run of a source; a run is returned as it is."""
    return source if isinstance(source, RunConfig) else load_run(source)


def _check(run: RunConfig) -> None:
    """Raise ValueError if what trains cannot be what is meant; log warnings about the run."""
    check_trainable(run)
    log_run_warnings(run)


def find_solution(run: RunConfig, *, lengths: str | None = None) -> Solution | CorpusSolution:
    """Return the best plan with the runners-up and what does not work; raise as :func:`solve`."""
    _check(run)
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
    return make_plan(solution.run, solution.best)


def planned_validation(
    run: RunConfig, step: EvaluatedCandidate, *, step_s: float | None = None
) -> ValidationPlan | None:
    """Return the plan of a run's validations on the layout of its steps; None if it has none.

    Args:
        run: Validated run configuration.
        step: Step of the run; for samples, of the longest.
        step_s: Predicted seconds of a step; None for those of `step`.
    """
    if run.validation is None or step.shortfall is not None:
        return None
    return plan_validation(
        run,
        candidate=step.candidate,
        training=step.memory,
        step_s=step_s or step.step_s,
        samples=evaluated_samples(run),
    )


def solve(run: RunSource, *, lengths: str | None = None) -> ExecutionPlan:
    """Return the fastest plan for `run` that fits into memory.

    The plan has degrees, cuts, schedule, placement of activations and predicted memory. Keys in the
    run are constraints; keys that are left out are chosen here. With ``data.samples=documents``,
    the degrees are those with which steps drawn from ``data.tokens`` are fastest, and the returned
    plan is for a step of the longest samples; training plans each step once its samples are known.

    Args:
        run: Run configuration, or what :func:`sppo.load_run` reads. Its ``hardware`` is the machine
            to plan for, by default this machine.
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
    return plan_of(find_solution(_run_of(run), lengths=lengths))


def estimate(run: RunSource) -> Estimate:
    """Return the predicted memory of `run` by bucket, whether it fits or not; nothing is run.

    ``.evaluated.memory`` has the memory of each stage; ``.evaluated.shortfall`` says which memory
    is short, or is None.

    Raises:
        ValueError: The run asks for something that the machine or the model cannot do.
    """
    run = with_label_share_if_there(_run_of(run))
    _check(run)
    found = estimate_run(run, hardware=run_hardware(run), draw=drawn_steps_if_there)
    return replace(found, validation=planned_validation(run, found.evaluated))


def steps_to_simulate(
    what: RunSource | ExecutionPlan, *, schedules: Sequence[str] = ()
) -> tuple[list[EvaluatedCandidate], tuple[str, ...]]:
    """Return the step of a plan, or of the plan that a run would get, to simulate.

    Args:
        what: Run or plan.
        schedules: Names of schedules under which the same step is returned as well.

    Returns:
        The step, then the steps under the other schedules; and the keys of the run that the solver
        has chosen.
    """
    if isinstance(what, ExecutionPlan):
        plans = [what, *(replace(what, schedule=name) for name in schedules)]
        return [plan.evaluated() for plan in plans], ()
    run = with_label_share_if_there(_run_of(what))
    _check(run)
    hardware = run_hardware(run)
    whole, chosen = with_chosen_degrees(run, hardware=hardware, draw=drawn_steps_if_there)
    step = executed_candidate(whole, hardware=hardware)
    return [step, *(in_schedule(step.candidate, name) for name in schedules)], chosen


def simulate(what: RunSource | ExecutionPlan) -> Timeline:
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
    (step,), _ = steps_to_simulate(what)
    schedule, costs = step.case()
    return play(schedule, costs=costs)


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


def train(
    run: RunSource, plan: ExecutionPlan | None = None, *, progress: bool = True
) -> TrainedRun:
    """Train until ``train.steps`` are done, from the newest checkpoint if there is one.

    Does the same as ``sppo train``. A run of one rank trains in this process; with degrees of
    parallelism above 1, written or chosen for several GPUs, or with ``train.restarts``, the call
    starts one process per rank on this machine. In a program started by torchrun or srun, every
    process makes the call and is one rank. Call this function in the main thread: on Ctrl-C or
    SIGTERM the current step is abandoned, the state is saved, and the call returns.

    Args:
        run: Run configuration, or what :func:`sppo.load_run` reads.
        plan: Plan from :func:`sppo.solve` to follow; None makes a plan for the memory that is free.
        progress: Print a description of the run, a line for each step, and a summary. False logs
            only warnings.

    Raises:
        ValueError: The run cannot be trained; nothing was changed.
        MemoryError: The run does not fit into memory.
        RunFailedError: A rank that was started failed, or rank 0 of these refused the run for want
            of memory or because of its plan, weights or labels; stderr says why.
        sppo.training.interruption.NonFiniteError: Too many consecutive steps with NaN or inf.
        sppo.training.interruption.CorruptionError: A device computed or kept wrong values.
        OSError: The disk is full or fails; files saved before are complete.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("sppo.train: call it in the main thread, which alone hears signals")
    run = _run_of(run)
    console = Console(quiet=not progress)
    ready = prepare_run(run, plan, console=console)
    if not ready.starts_ranks:
        outcome = train_as_rank(ready, console=console, command="the same call")
        return trained_run(ready.run, interrupted_by=outcome.interrupted_by)
    with tempfile.TemporaryDirectory(prefix="sppo-") as directory:
        run_file, plan_file = Path(directory, "run.yaml"), Path(directory, "plan.json")
        write_json(run_file, run_sections(run))  # JSON is YAML
        words = ["train", str(run_file)] + ([] if progress else ["--quiet"])
        if plan is not None:
            write_json(plan_file, plan_json(plan))
            words += ["--plan", str(plan_file)]
        code = train_on_ranks(ready, words, console=console)
    stopped = STOP_CODES.get(code)
    if code != 0 and stopped is None:
        raise RunFailedError(code)
    return trained_run(ready.run, interrupted_by=stopped)


def evaluate(
    run: RunSource,
    *,
    checkpoint: Path | str | None = None,
    initial: bool = False,
    sequences: int | None = None,
    on_sequence: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Return the loss of a run's newest weights on ``data.eval_tokens``, or else ``data.tokens``.

    In a program started by torchrun or srun, every process makes the call and is one rank. In any
    other program, this process evaluates alone, whatever degrees of parallelism the run has.

    Args:
        run: Run configuration, or what :func:`sppo.load_run` reads.
        checkpoint: Directory of a checkpoint; None uses the newest checkpoint of the run.
        initial: Evaluate the initial weights of the run instead.
        sequences: Number of sequences, or samples, to evaluate from the first on; None evaluates
            all.
        on_sequence: Function called with (number of sequences or samples done, total number).

    Returns:
        Evaluation with ``.loss`` in nats, ``.perplexity``, and ``.by_position`` in the context.

    Raises:
        ValueError: There is no checkpoint, or data or weights cannot be used.
        MemoryError: The evaluation does not fit into memory.
    """
    if sequences is not None and sequences < 1:
        raise ValueError(f"sequences={sequences}: evaluate at least one, or leave it out")
    run = _run_of(run)
    if rank_environment(os.environ) is None:
        run = run.with_values({f"parallel.{name}": 1 for name in DEGREES})
    weights = EvaluatedWeights(None if checkpoint is None else Path(checkpoint), initial)
    ready = prepare_evaluation(run, weights, console=Console(quiet=True))
    return evaluate_as_rank(ready, weights, sequences=sequences, on_sequence=on_sequence)


def evaluate_as_rank(
    ready: ReadyRun,
    weights: EvaluatedWeights,
    *,
    sequences: int | None,
    on_sequence: Callable[[int, int], None] | None,
) -> Evaluation:
    """Return the evaluation of a run, of which this process is one rank; see :func:`evaluate`."""
    with evaluating_job(ready, weights) as job:
        from sppo.training.evaluation.evaluated_run import evaluate as evaluate_run

        return evaluate_run(
            job,
            weights.source(ready.run),
            most=sequences,
            on_sequence=on_sequence or (lambda done, total: None),
        )
