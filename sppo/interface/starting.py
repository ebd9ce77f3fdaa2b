"""Starts a run: looks at what it names, then starts its ranks, or is one of them."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sppo.config import RunConfig
from sppo.interface.announcement import announce, announce_ranks
from sppo.kernels.native.machine_memory import check_room_for_libraries
from sppo.parallel.job.environment import (
    RankEnvironment,
    rank_environment,
    torch_kept_quiet,
    with_module_path,
)
from sppo.parallel.mesh_shape import MeshShape
from sppo.planning.plan import ExecutionPlan

if TYPE_CHECKING:
    from rich.console import Console

    from sppo.training.devices.device import Device
    from sppo.training.outcome import TrainingOutcome


@dataclass(frozen=True, slots=True)
class ReadyRun:
    """A run that may be started: what it names was looked at.

    Attributes:
        run: With the degrees of its plan.
        plan: To follow; None decides when it starts.
        environment: This process's place among the ranks; None: it stands alone, or starts them.
        num_ranks: Of the run.
        device: That this process computes on, or the ranks that it starts.
    """

    run: RunConfig
    plan: ExecutionPlan | None
    environment: RankEnvironment | None
    num_ranks: int
    device: Device

    @property
    def starts_ranks(self) -> bool:
        """Return whether this process starts the ranks, and trains nothing itself."""
        return self.environment is None and self.num_ranks > 1


def made_ready(
    run: RunConfig, plan: ExecutionPlan | None, *, source: str, console: Console
) -> ReadyRun:
    """Look at what a run names, choose its device, and say which ranks are to be started.

    What needs no torch comes first: whoever mistyped a path is told at once, and does not wait
    for torch to be imported.

    Args:
        run: checked.
        plan: to follow; None decides when the run starts.
        source: what errors call the plan.
        console: where the ranks are announced.

    Raises:
        ValueError: input that cannot be trained on; nothing was changed.
        MemoryError: not even the libraries fit.
    """
    from sppo.training.checks.given_plan import check_kind, followed_plan
    from sppo.training.checks.input_checks import check_inputs

    environment = rank_environment(os.environ)
    if plan is not None:
        run = followed_plan(run, plan)
    num_ranks = MeshShape.of(run.parallel).num_ranks
    starts_ranks = environment is None and num_ranks > 1
    if environment is None:  # of ranks that others started, one tells for all, once they have met
        check_inputs(run)
    check_room_for_libraries(processes=1 + num_ranks if starts_ranks else 1)
    if starts_ranks:
        announce_ranks(run, console)
    with torch_kept_quiet(os.environ):
        from sppo.training.devices.choose_device import choose_device, device_kind
    if plan is not None:
        check_kind(plan, kind=device_kind(run), source=source)
    local_ranks = num_ranks if starts_ranks else 1
    device = choose_device(run, environment=environment, local_ranks=local_ranks)
    return ReadyRun(run, plan, environment, num_ranks, device)


def start_ranks(ready: ReadyRun, words: list[str], *, console: Console) -> int:
    """Check what depends on memory, then run the ``sppo`` command once for every rank.

    Args:
        ready: the run.
        words: arguments of the command.
        console: where the run is announced.

    Returns:
        the exit code, as :func:`sppo.parallel.job.launch.run_ranks`.

    Raises:
        ValueError: input that cannot be trained on; nothing was changed.
        MemoryError: it does not fit.
    """
    from sppo.hardware.this_machine import count_cores
    from sppo.parallel.job.launch import run_ranks
    from sppo.parallel.job.open_files import allow_connections
    from sppo.report.display import logging_to
    from sppo.training.checks.preflight import check_before_training

    run, num_ranks, device = ready.run, ready.num_ranks, ready.device
    with logging_to(None if console.quiet else console):
        allow_connections(num_ranks)
        preflight = check_before_training(
            run, plan=ready.plan, local_ranks=num_ranks, device=device, starts_ranks=True
        )
        announce(run, preflight, console, device=device)
        return run_ranks(
            [sys.executable, "-P", "-m", "sppo", *words],
            num_ranks=num_ranks,
            environ=with_module_path(os.environ),
            threads_per_rank=max(1, count_cores() // num_ranks),
        )


def train_as_rank(ready: ReadyRun, *, console: Console, command: str) -> TrainingOutcome:
    """Train as one rank of the run, or alone.

    Args:
        ready: the run.
        console: where progress goes; rank 0's is used.
        command: that goes on with the run where steps are left.

    Raises:
        ValueError: input that cannot be trained on; nothing was changed.
        MemoryError: it does not fit.
        PeerLostError: another rank ended or does not answer.
        NonFiniteError: too many steps in a row with NaN or inf.
        OSError: the disk is full or fails.
    """
    from rich.console import Console

    from sppo.report.display import logging_to
    from sppo.training.checks.libraries import load_libraries
    from sppo.training.checks.preflight import check_before_training
    from sppo.training.interruption import StopRequest
    from sppo.training.ranks import joined
    from sppo.training.results import report
    from sppo.training.trainer import train as train_run

    run, plan, device, environment = ready.run, ready.plan, ready.device, ready.environment
    is_main = environment is None or environment.rank == 0
    console = console if is_main else Console(quiet=True)
    with (
        logging_to(None if console.quiet else console),
        joined(run, environment, device=device) as ranks,
    ):
        local = ranks.local_ranks
        if device.kind == "cpu":
            load_libraries()
        ranks.peers.barrier()  # memory is free only once every rank has what all will have
        decided = ranks.decided_by_main(
            lambda: check_before_training(run, plan=plan, local_ranks=local, device=device).plan
        )
        preflight = check_before_training(run, plan=decided, local_ranks=local, device=device)
        ranks.peers.barrier()  # what is free is looked at before any rank takes some
        if environment is None or environment.launcher != "sppo":
            announce(run, preflight, console, device=device)
        outcome = train_run(run, preflight, console=console, ranks=ranks, device=device)
        if is_main:
            # Once all steps are done a signal comes too late to change how the run ends.
            with StopRequest() if outcome.interrupted_by is None else nullcontext():
                report(run, preflight, outcome, console=console, command=command)
    return outcome
