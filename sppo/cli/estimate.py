"""``sppo estimate``: predicted memory of a run as it stands, by memory bucket."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from sppo.api import estimate as estimate_run
from sppo.cli.arguments.common import Json, Overrides, RunFile
from sppo.cli.arguments.planned_run import load_planned_run
from sppo.cli.exit_codes import exit_codes
from sppo.cli.output.estimate import EstimateReport
from sppo.cli.output.printing import emit, say
from sppo.planning.estimate import Estimate

if TYPE_CHECKING:
    from sppo.dry_run.traced_step import TracedStep


def estimate(
    run_file: RunFile,
    overrides: Overrides = None,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="Also run two steps of the rank that holds most on a fake GPU, "
            "tensor by tensor, and put what it held beside the plan.",
        ),
    ] = False,
    layers: Annotated[
        int | None,
        typer.Option(
            "--layers",
            metavar="K",
            help="Trace K and 2 K layers of each stage, and extrapolate.",
            show_default=False,
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """Predict memory by bucket, as sppo train would plan the run; nothing is run.

    Degrees that the run file leaves out are those that sppo solve chooses for the machine in the
    section hardware, by default this machine; policy auto is a policy that fits. Needs neither the
    data, nor the weights, nor the machine that is planned for.

        sppo estimate configs/run/gpt_7b_512k_32gpu.yaml sequence.length=4Mi
        sppo estimate configs/run/llama_1b_1m_1gpu.yaml sequence.length=64Ki --trace
    """
    with exit_codes():
        if layers is not None and not trace:
            raise ValueError("--layers says what --trace traces: write both")
        found = estimate_run(load_planned_run(run_file, overrides or ()))
        traced = _trace(found, layers=layers) if trace else None
    emit(EstimateReport(found, traced), as_json=json_output)


def _trace(found: Estimate, *, layers: int | None) -> TracedStep:
    """Trace the pipeline rank that holds the most memory, with progress on stderr."""
    for package in ("torch", "triton"):
        if find_spec(package) is None:
            raise ValueError(
                f"--trace runs the engine, whose kernels are {package}'s, and {package} is not "
                f"installed: pip install {package}, or leave --trace out"
            )
    from sppo.dry_run.traced_run import RunTracer

    tracer = RunTracer(found, layers)
    console = Console(stderr=True)
    say(console, f"tracing {tracer.num_actions} actions of a rank")
    if found.evaluated.shortfall is not None:
        reason = found.evaluated.shortfall.reason
        say(console, f"the plan does not fit and is traced all the same: {reason}")
    if not console.is_terminal:
        return tracer.trace()
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("tracing", total=tracer.num_actions)
        return tracer.trace(on_action=lambda: bar.advance(task))
