"""Start of a run: checks of its inputs, then the start of its ranks, or training as one rank.

Every check of a run is made once. The process that the user starts checks the run file and its
inputs, which needs no torch, and chooses degrees that are left open. Rank 0 then makes the checks
that depend on memory, and the plan (:mod:`sppo.training.preflight`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rich.console import Console

from sppo.config import RunConfig
from sppo.config.advice import log_run_warnings
from sppo.config.rules import broken_rules
from sppo.data.samples.epochs import with_steps
from sppo.hardware.this_machine import count_cores, find_gpus
from sppo.kernels.native.machine_memory import check_room_for_libraries
from sppo.parallel.job.environment import (
    RankEnvironment,
    rank_environment,
    seeing_devices,
    torch_kept_quiet,
    with_module_path,
)
from sppo.parallel.job.job_end import JobEnd
from sppo.parallel.job.launch import run_ranks
from sppo.parallel.job.open_files import allow_connections
from sppo.parallel.mesh_shape import MeshShape
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.plan import ExecutionPlan, check_plan_fits, check_program
from sppo.report.display import logging_to
from sppo.report.lines import print_titled
from sppo.training.input_checks import EvaluatedWeights, check_evaluation, check_inputs
from sppo.training.interruption import StopRequest
from sppo.units import counted

if TYPE_CHECKING:
    from sppo.training.job import Job
    from sppo.training.records.outcome import TrainingOutcome


@dataclass(frozen=True, slots=True)
class ReadyRun:
    """Run whose inputs were checked and that may be started."""

    asked: RunConfig
    """Run configuration with the degrees of the plan, or those that are written."""
    plan: ExecutionPlan | None
    """Plan to follow; None if the plan is made at the start."""
    environment: RankEnvironment | None
    """Place of this process among the ranks; None if the process trains alone or starts the ranks.
    """
    chosen: Mapping[str, int] = field(default_factory=dict)
    """Degrees that were chosen because the run leaves them out, or for want of devices, by name."""
    devices: tuple[int, ...] = ()
    """Devices of the ranks that this process starts, by number on this machine; there may be more.
    """
    restarts: int = 0
    """Most times that the ranks are started again after a fault. Above 0, a single rank, too, is a
    process of its own."""

    @property
    def run(self) -> RunConfig:
        """Run configuration with the chosen degrees."""
        return self.asked.with_values({f"parallel.{key}": n for key, n in self.chosen.items()})

    @property
    def is_main(self) -> bool:
        """True if this process is rank 0, or alone."""
        return self.environment is None or self.environment.rank == 0

    @property
    def starts_ranks(self) -> bool:
        """True if this process starts the ranks instead of training itself."""
        num_ranks = MeshShape.of(self.run.parallel).num_ranks
        return self.environment is None and (num_ranks > 1 or self.restarts > 0)


def prepare_run(run: RunConfig, plan: ExecutionPlan | None, *, console: Console) -> ReadyRun:
    """Check the inputs of a run, and choose the degrees that it leaves out.

    Checks that need no torch come first, so that a mistyped path is reported before the import of
    torch. Degrees that the run leaves out are those of the plan, or else those that ``sppo solve``
    chooses for the ranks of the job, or for the devices of this machine. A rank that ``sppo`` has
    started checks nothing again.

    Args:
        run: Validated run configuration.
        plan: Plan to follow; None to make the plan when the run starts.
        console: Console on which chosen degrees and the start of ranks are announced.

    Raises:
        ValueError: The run cannot be trained; nothing was changed.
        MemoryError: There is too little memory even for the libraries.
    """
    environment = rank_environment(os.environ)
    if plan is not None:
        run = followed_plan(run, plan)
        if run.train.shrink:
            raise ValueError(
                "train.shrink=true plans again for fewer devices, and --plan keeps to one plan: "
                "leave one of them out"
            )
    if environment is not None and environment.launcher == "sppo":
        return ReadyRun(with_steps(run), plan, environment)
    if environment is None:  # else rank 0 checks for all ranks, once they are connected
        check_inputs(run)
    epochs, run = run.train.epochs, with_steps(run)
    if environment is None or environment.rank == 0:
        log_run_warnings(run)  # once for all ranks
    else:
        console = Console(quiet=True)
    if epochs is not None:
        passes = f"{epochs:g} of {', '.join(run.data.directories.values())}"
        print_titled("epochs", f"{passes}: {run.train.steps} steps", console)
    return on_devices(ReadyRun(run, plan, environment, restarts=run.train.restarts), console)


def on_devices(
    ready: ReadyRun,
    console: Console,
    *,
    left_out: Set[int] = frozenset(),
    like: RunConfig | None = None,
) -> ReadyRun:
    """Return a run with the devices that are here, and the degrees that they leave to choose.

    Announces chosen degrees and the start of ranks.

    Args:
        ready: Run whose inputs were checked; degrees that were chosen before are chosen again.
        console: Console for the announcements.
        left_out: Devices of this machine that are not used, by number.
        like: Run to choose degrees for, if the run itself is not trained.

    Raises:
        ValueError: No device is left, or the run asks for something that the machine cannot do.
        MemoryError: There is too little memory even for the libraries.
    """
    asked, environment = like or ready.asked, ready.environment
    devices = _devices(asked, environment, left_out)
    chosen: Mapping[str, int] = {}
    if ready.plan is None:
        chosen = _chosen_degrees(asked, environment, ranks=len(devices), console=console)
    ready = replace(ready, chosen=chosen, devices=devices)
    shape = MeshShape.of(ready.run.parallel)
    check_room_for_libraries(processes=1 + shape.num_ranks if ready.starts_ranks else 1)
    if ready.starts_ranks:
        where = f"{counted(shape.num_ranks, 'rank')} on this machine"
        where += f" ({shape})" if shape.num_ranks > 1 else ""
        print_titled("start", f"{where}: torch is loaded and the run is checked first", console)
    return ready


def _devices(
    run: RunConfig, environment: RankEnvironment | None, left_out: Set[int]
) -> tuple[int, ...]:
    """Return the devices for ranks of this machine by number, or of the job that was started.

    They need not be looked for if the run neither leaves degrees out nor shrinks, or on a CPU,
    which has room for all ranks.
    """
    if environment is not None:
        return tuple(range(environment.world_size))
    found = tuple(range(run.parallel.written_ranks))
    if (run.parallel.open_degrees or run.train.shrink) and find_gpus() is not None:
        check_room_for_libraries()
        with torch_kept_quiet(os.environ):
            from sppo.training.devices.device import devices_here
        found = devices_here(run)
    devices = tuple(number for number in found if number not in left_out)
    if not devices:
        raise ValueError("no device of this machine answers, or is left to go on with")
    return devices


def _chosen_degrees(
    run: RunConfig, environment: RankEnvironment | None, *, ranks: int, console: Console
) -> Mapping[str, int]:
    """Return the degrees to choose for a number of ranks, by name; {} if the written ones hold.

    These are the degrees that the run leaves out, or all if it needs more ranks and may shrink.
    """
    needed, whose = run.parallel.written_ranks, "those you write are kept"
    if run.train.shrink and ranks < needed:
        run, whose = run.with_open_degrees(), f"those you write need {needed} (train.shrink)"
    elif not run.parallel.open_degrees or needed >= ranks:
        return {}
    check_room_for_libraries()
    with torch_kept_quiet(os.environ):
        from sppo.training.devices.device import chosen_degrees
    if run.data.samples == "documents":
        how = "as sppo solve does: this may take minutes"
        print_titled(
            "degrees", f"planning drawn steps for {counted(ranks, 'device')}, {how}", console
        )
    chosen = chosen_degrees(run, environment, ranks=ranks)
    degrees = MeshShape.of(run.parallel.model_copy(update=chosen))
    where = f"chosen for {counted(ranks, 'device')}; {whose}"
    print_titled("degrees", f"{str(degrees) or 'all 1'}, {where}", console)
    return chosen


def prepare_evaluation(run: RunConfig, weights: EvaluatedWeights, *, console: Console) -> ReadyRun:
    """Check the inputs of an evaluation, and choose the degrees that its run leaves out.

    Args:
        run: Validated run configuration.
        weights: Weights of it that are evaluated.
        console: Console on which chosen degrees and the start of ranks are announced.

    Raises:
        ValueError: The evaluation is not possible.
        MemoryError: There is too little memory even for the libraries.
    """
    environment = rank_environment(os.environ)
    if environment is not None and environment.launcher == "sppo":
        return ReadyRun(run, None, environment)
    if environment is None:  # else rank 0 checks for all ranks, once they are connected
        check_evaluation(run, weights)
    if environment is None or environment.rank == 0:
        log_run_warnings(run)  # once for all ranks
    else:
        console = Console(quiet=True)
    longest = run_of_longest_samples(run).with_values({"data.samples": "stream"})
    return on_devices(ReadyRun(run, None, environment), console, like=longest)


def start_ranks(ready: ReadyRun, words: Sequence[str]) -> JobEnd:
    """Run the ``sppo`` command once for every rank, and report a failure.

    Rank 0 checks the run, and prints.

    Args:
        ready: Run to start.
        words: Arguments of the command.

    Raises:
        ValueError: This machine has fewer GPUs than ranks.
        MemoryError: The limit of open files is too low.
    """
    with torch_kept_quiet(os.environ):
        from sppo.training.devices.device import check_devices

    num_ranks, environ = MeshShape.of(ready.run.parallel).num_ranks, with_module_path(os.environ)
    if ready.run.train.shrink:
        environ = seeing_devices(environ, ready.devices[:num_ranks])
    check_devices(ready.run, local_ranks=num_ranks)
    allow_connections(num_ranks)
    end = run_ranks(
        [
            *(sys.executable, "-P", "-m", "sppo", *words),
            *(f"parallel.{name}={degree}" for name, degree in ready.chosen.items()),
        ],
        num_ranks=num_ranks,
        environ=environ,
        threads_per_rank=max(1, count_cores() // num_ranks),
    )
    end.tell()
    return end


def train_as_rank(ready: ReadyRun, *, console: Console, command: str) -> TrainingOutcome:
    """Train as one rank of the run, or as its only rank.

    Args:
        ready: Run to train.
        console: Console for progress; only that of rank 0 is used.
        command: Command that continues the run, for the report of an interrupted run.

    Raises:
        ValueError: The run cannot be trained; nothing was changed.
        MemoryError: The run does not fit into memory.
        PeerLostError: Another rank ended or does not answer.
        NonFiniteError: Too many consecutive steps with NaN or inf.
        OSError: The disk is full or fails.
    """
    with torch_kept_quiet(os.environ):
        from sppo.training.devices.device import choose_device
        from sppo.training.job import joined
        from sppo.training.preflight import preflight
        from sppo.training.report import announce, report
        from sppo.training.trainer import train as train_run

    run, environment = ready.run, ready.environment
    console = console if ready.is_main else Console(quiet=True)
    device = choose_device(run, environment=environment)
    with (
        logging_to(None if console.quiet else console),
        joined(run, environment, device=device, console=console) as job,
    ):
        if environment is not None and environment.launcher != "sppo":
            job.peers.decided_by_main(lambda: check_inputs(run))
        job.progress.reached("started")
        checked = preflight(job, ready.plan)
        job.progress.reached("planned")
        announce(checked)
        outcome = train_run(checked)
        # After the last step a signal is too late to change the outcome of the run.
        with StopRequest() if outcome.interrupted_by is None else nullcontext():
            # The others wait, so that a rank 0 that hangs does not go unnoticed.
            job.peers.decided_by_main(lambda: report(checked, outcome, command=command))
    return outcome


@contextmanager
def evaluating_job(ready: ReadyRun, weights: EvaluatedWeights) -> Iterator[Job]:
    """Yield the job of this process in an evaluation, once the inputs are checked. Collective.

    Args:
        ready: Run to evaluate.
        weights: Weights of it that are evaluated.

    Raises:
        ValueError: The evaluation is not possible.
        PeerLostError: Another rank did not connect.
    """
    with torch_kept_quiet(os.environ):
        from sppo.training.devices.device import choose_device
        from sppo.training.job import joined
    run, environment = ready.run, ready.environment
    device = choose_device(run, environment=environment)
    with joined(run, environment, device=device, console=Console(quiet=True)) as job:
        if environment is not None and environment.launcher != "sppo":
            job.peers.decided_by_main(lambda: check_evaluation(run, weights))
        yield job


def followed_plan(run: RunConfig, plan: ExecutionPlan) -> RunConfig:
    """Return the run with its degrees of parallelism set to those of a plan.

    Args:
        run: Validated run configuration.
        plan: Plan made by `sppo solve`.

    Raises:
        ValueError: The plan is for another run, or this version cannot follow it.
    """
    check_plan_fits(plan, run_of_longest_samples(run))
    check_program(plan)
    chosen = {
        "data_parallel_degree": plan.data_parallel_degree,
        "pipeline_parallel_degree": plan.pipeline_parallel_degree,
        "sequence_parallel_degree": plan.sequence_parallel_degree,
        "sequence_parallel": plan.sequence_parallel,
    }
    followed = run.with_values({f"parallel.{key}": value for key, value in chosen.items()})
    problems = list(broken_rules(followed))
    if problems:
        first = problems[0]
        raise ValueError(f"with the degrees of the plan, {first.path} {first.value} {first.rule}")
    return followed
