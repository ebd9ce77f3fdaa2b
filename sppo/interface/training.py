"""Training as a function, and what a run has left in its output directory."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sppo.checkpoint.files import CHECKPOINTS_DIRECTORY, list_checkpoints
from sppo.config import RunConfig, run_sections
from sppo.interface.announcement import announce
from sppo.kernels.native.machine_memory import check_room_for_libraries
from sppo.output_file import write_json
from sppo.parallel.job.environment import (
    RankEnvironment,
    keep_torch_quiet,
    rank_environment,
    with_module_path,
)
from sppo.parallel.job.failures import STOP_CODES
from sppo.parallel.mesh_shape import MeshShape
from sppo.planning.plan import ExecutionPlan, plan_json, read_plan
from sppo.quoting import quoted
from sppo.report.metrics import METRICS_FILE, StepMetrics, read_metrics

if TYPE_CHECKING:
    from rich.console import Console

    from sppo.training.devices.device import Device
    from sppo.training.outcome import TrainingOutcome


class RunFailedError(RuntimeError):
    """Ranks that were started for a run failed; stderr says which one and why.

    Attributes:
        exit_code: Of the rank to blame, as ``sppo train`` ends with it.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the ranks ended with exit code {exit_code}; stderr says why")
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """What a run has done so far, as its output directory has it.

    Attributes:
        output: The directory, by its absolute path.
        steps: Of training, done and recorded.
        metrics: Of each of them, in order.
        interrupted_by: Name of the signal that ended the last call early; None if none did.
    """

    output: Path
    steps: int
    metrics: tuple[StepMetrics, ...] = field(repr=False)
    interrupted_by: str | None = None

    @property
    def losses(self) -> list[float]:
        """Mean loss of each step, nats per label; NaN where a step had none."""
        return [step.loss for step in self.metrics]

    @property
    def plan(self) -> ExecutionPlan:
        """What was run, with what it was predicted to take.

        Raises:
            ValueError: there is none yet, or it is damaged.
        """
        from sppo.training.run_directory import PLAN_FILE

        return read_plan(self.output / PLAN_FILE)

    @property
    def summary(self) -> dict[str, Any]:
        """``run_summary.json``: predicted against measured, of the last call that trained.

        Raises:
            OSError: there is none.
        """
        from sppo.training.run_directory import SUMMARY_FILE

        found: dict[str, Any] = json.loads((self.output / SUMMARY_FILE).read_text("utf-8"))
        return found

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint; None before the first."""
        found = list_checkpoints(self.output / CHECKPOINTS_DIRECTORY)
        return found[0][1] if found else None


def train(
    run: RunConfig, plan: ExecutionPlan | None = None, *, progress: bool = True
) -> TrainedRun:
    """Train until ``train.steps`` are done; goes on from the newest checkpoint if there is one.

    Does what ``sppo train`` does, in this process where one rank trains; with degrees of
    parallelism above 1 it starts that many processes on this machine. In a program that torchrun or
    srun started, every process calls it and is one rank. Call it in the main thread: Ctrl-C and
    SIGTERM end it after the step under way is given up and the state is saved.

    Args:
        run: of :func:`sppo.load_run`.
        plan: of :func:`sppo.solve`, to follow; None decides here, for the memory that is free.
        progress: print what the run is, a line for each step, and a summary; a notebook with
            ipywidgets shows bars, too. Without it only warnings are logged.

    Raises:
        TypeError: ``run`` or ``plan`` is something else, e.g. a path.
        ValueError: input that cannot be trained on; nothing was changed.
        MemoryError: it does not fit.
        RunFailedError: a rank that was started failed.
        sppo.training.steps.nonfinite.NonFiniteError: too many steps in a row with NaN or inf.
        OSError: the disk is full or fails; what was saved is whole.
    """
    from rich.console import Console

    from sppo.training.checks.given_plan import followed_plan
    from sppo.training.devices.choose_device import choose_device, device_kind
    from sppo.training.ranks import mesh_shape

    if not isinstance(run, RunConfig) or not isinstance(plan, ExecutionPlan | None):
        raise TypeError(
            f"sppo.train({quoted(run)}, {quoted(plan)}): give it a run of sppo.load_run, and a "
            "plan of sppo.solve or sppo.load_plan"
        )
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("sppo.train: call it in the main thread, which alone hears signals")
    keep_torch_quiet(os.environ)
    environment = rank_environment(os.environ)
    check_room(run, environment)
    asked = run
    if plan is not None:
        run = followed_plan(run, plan, kind=device_kind(run), source="the plan")
    console = Console(quiet=not progress)
    num_ranks = mesh_shape(run).num_ranks
    if environment is None and num_ranks > 1:
        device = choose_device(run, local_ranks=num_ranks)
        with tempfile.TemporaryDirectory(prefix="sppo-") as directory:
            words = ["train", *_as_files(asked, plan, Path(directory))]
            words += [] if progress else ["--quiet"]
            code = start_ranks(
                run, plan, words, num_ranks=num_ranks, device=device, console=console
            )
        stopped = STOP_CODES.get(code)
        if code != 0 and stopped is None:
            raise RunFailedError(code)
        return trained_run(run, interrupted_by=stopped)
    device = choose_device(run, environment=environment)
    outcome = train_as_rank(
        run, plan, environment, device=device, console=console, command="the same call"
    )
    return trained_run(run, interrupted_by=outcome.interrupted_by)


def trained_run(run: RunConfig, *, interrupted_by: str | None = None) -> TrainedRun:
    """What ``run`` has done so far; of a run that has not begun, nothing.

    Args:
        run: with the ``train.output`` to look into.
        interrupted_by: name of the signal that ended it early.

    >>> import sppo
    >>> run = sppo.load_run(
    ...     {"model": {"preset": "tiny"}, "data": {"tokens": "data"}, "sequence": {"length": 64}},
    ...     {"train.output": "/nonexistent"},
    ... )
    >>> sppo.trained_run(run).steps
    0
    """
    output = Path(run.train.output).absolute()
    file = output / METRICS_FILE
    metrics = tuple(read_metrics(file)) if file.is_file() else ()
    return TrainedRun(output, metrics[-1].step if metrics else 0, metrics, interrupted_by)


def check_room(run: RunConfig, environment: RankEnvironment | None) -> None:
    """Refuse, before torch is loaded, to load it where it does not fit, once for every process.

    Raises:
        MemoryError: it does not.
    """
    ranks = MeshShape.of(run.parallel).num_ranks
    starts_ranks = environment is None and ranks > 1
    check_room_for_libraries(processes=1 + ranks if starts_ranks else 1)


def start_ranks(
    run: RunConfig,
    plan: ExecutionPlan | None,
    words: list[str],
    *,
    num_ranks: int,
    device: Device,
    console: Console,
) -> int:
    """Check everything, then run the ``sppo`` command once for every rank.

    Args:
        run: checked.
        plan: to follow; None decides here.
        words: arguments of the command.
        num_ranks: how many.
        device: that the ranks compute on.
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

    with logging_to(None if console.quiet else console):
        allow_connections(num_ranks)
        preflight = check_before_training(
            run, plan=plan, local_ranks=num_ranks, device=device, starts_ranks=True
        )
        announce(run, preflight, console, device=device)
        return run_ranks(
            [sys.executable, "-P", "-m", "sppo", *words],
            num_ranks=num_ranks,
            environ=with_module_path(os.environ),
            threads_per_rank=max(1, count_cores() // num_ranks),
        )


def train_as_rank(
    run: RunConfig,
    plan: ExecutionPlan | None,
    environment: RankEnvironment | None,
    *,
    device: Device,
    console: Console,
    command: str,
) -> TrainingOutcome:
    """Train as one rank of the run, or alone.

    Args:
        run: checked.
        plan: to follow; None decides here.
        environment: this process's place among the ranks; None: it is alone.
        device: that it computes on.
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

    is_main = environment is None or environment.rank == 0
    console = console if is_main else Console(quiet=True)
    with (
        logging_to(None if console.quiet else console),
        joined(run, environment, device=device) as ranks,
    ):
        local = ranks.local_count
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


def _as_files(run: RunConfig, plan: ExecutionPlan | None, directory: Path) -> list[str]:
    """Write a run and the plan that it follows, and return the arguments that name them."""
    run_file, plan_file = directory / "run.yaml", directory / "plan.json"
    write_json(run_file, run_sections(run))  # JSON is YAML
    if plan is None:
        return [str(run_file)]
    write_json(plan_file, plan_json(plan))
    return [str(run_file), "--plan", str(plan_file)]
