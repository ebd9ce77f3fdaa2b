"""``sppo train``: train a run, or continue it from its newest checkpoint."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sppo.cli.arguments import Overrides, RunFile
from sppo.cli.exit_codes import exit_codes
from sppo.cli.stop_signals import Stopped
from sppo.config import load_run
from sppo.parallel.job.signals import stopped_exit_code
from sppo.planning.plan import read_plan
from sppo.training.restarts import train_on_ranks
from sppo.training.start import prepare_run, train_as_rank

_GOES_ON = ": the same command goes on from the newest checkpoint, or begins again"


def train(
    run_file: RunFile,
    overrides: Overrides = None,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="Follow this plan of sppo solve."),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")
    ] = False,
) -> None:
    """Train a run; the same command continues a killed or stopped run.

    Trains on the machine's GPUs, one per rank, if torch sees any and the hardware section names no
    CPU. Degrees of parallelism that the run file leaves out are those that sppo solve chooses for
    these GPUs, or for the ranks that torchrun or srun has started; on a CPU they are 1. Without a
    launcher the command starts one process per rank on this machine. Writes metrics.jsonl,
    loss.png, run_summary.json and checkpoints into train.output.

        sppo train configs/run/tiny_cpu.yaml train.steps=20
        sppo train configs/run/tiny_cpu.yaml parallel.pipeline_parallel_degree=2
    """
    with exit_codes():
        run = load_run(run_file, overrides or ())
        console = Console(quiet=quiet)
        chosen = None if plan is None else read_plan(plan)
        try:
            ready = prepare_run(run, chosen, console=console)
            if ready.starts_ranks:
                raise typer.Exit(train_on_ranks(ready, sys.argv[1:], console=console))
            environment = ready.environment
            is_ours = environment is None or environment.launcher == "sppo"
            command = shlex.join(["sppo", *sys.argv[1:]]) if is_ours else "the same command"
            outcome = train_as_rank(ready, console=console, command=command)
        except Stopped as stopped:
            stopped.advice = _GOES_ON
            raise
    if outcome.interrupted_by is not None:
        raise typer.Exit(stopped_exit_code(signal.Signals[outcome.interrupted_by]))
