"""``sppo estimate``: predicted memory of a run as it stands, by memory bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from sppo.cli.arguments.common import Json, Overrides, RunFile
from sppo.cli.exit_codes import exit_codes

if TYPE_CHECKING:
    from sppo.dry_run.traced_step import TracedStep
    from sppo.planning.baselines import Baseline
    from sppo.planning.estimate import Estimate


def estimate(
    run_file: RunFile,
    overrides: Overrides = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--baselines", help="Also the longest sequence that fits here, trained in other ways."
        ),
    ] = False,
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
        sppo estimate configs/run/gpt_7b_512k_32gpu.yaml --baselines
        sppo estimate configs/run/llama_1b_1m_1gpu.yaml sequence.length=64Ki --trace
    """
    with exit_codes():
        from sppo.cli.arguments.planned_run import load_planned_run
        from sppo.data.samples.step_lengths import drawn_steps_if_there
        from sppo.hardware.run_hardware import run_hardware
        from sppo.planning.estimate import estimate as estimate_run

        if layers is not None and not trace:
            raise ValueError("--layers says what --trace traces: write both")
        run = load_planned_run(run_file, overrides or ())
        found = estimate_run(run, hardware=run_hardware(run), draw=drawn_steps_if_there)
        rows = _baselines(found, quiet=json_output) if compare else ()
        traced = _trace(found, layers=layers) if trace else None
    _print(found, baselines=rows, traced=traced, as_json=json_output)


def _trace(found: Estimate, *, layers: int | None) -> TracedStep:
    """Trace the pipeline rank that holds the most memory, with progress on stderr."""
    from importlib.util import find_spec

    from rich.console import Console
    from rich.progress import Progress

    for package in ("torch", "triton"):
        if find_spec(package) is None:
            raise ValueError(
                f"--trace runs the engine, whose kernels are {package}'s, and {package} is not "
                f"installed: pip install {package}, or leave --trace out"
            )
    from sppo.dry_run.traced_run import RunTracer
    from sppo.report.lines import print_line

    tracer = RunTracer(found, layers)
    console = Console(stderr=True)
    print_line(f"tracing {tracer.num_actions} actions of a rank", console)
    if found.evaluated.shortfall is not None:
        reason = found.evaluated.shortfall.reason
        print_line(f"the plan does not fit and is traced all the same: {reason}", console)
    if not console.is_terminal:
        return tracer.trace()
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("tracing", total=tracer.num_actions)
        return tracer.trace(on_action=lambda: bar.advance(task))


def _baselines(found: Estimate, *, quiet: bool) -> tuple[Baseline, ...]:
    from sppo.cli.output.working import working
    from sppo.planning.baselines import baselines

    text = "searching the longest sequence of each way to train"
    with working(text, says_so=not quiet) as show:
        return baselines(
            found.run,
            hardware=found.hardware,
            evaluated=found.evaluated,
            on_method=lambda place, name: show(f"{text}: {place}, {name}"),
        )


def _print(
    found: Estimate,
    *,
    baselines: tuple[Baseline, ...],
    traced: TracedStep | None,
    as_json: bool,
) -> None:
    """Print one JSON object, or tables."""
    if as_json:
        import json

        from sppo.cli.output.estimate_json import estimate_report, trace_report

        report = estimate_report(found, baselines=baselines)
        if traced is not None:
            report["trace"] = trace_report(traced)
        typer.echo(json.dumps(report, allow_nan=False))
        return
    from rich.console import Console

    from sppo.cli.output.estimate_tables import print_baselines, print_estimate

    console = Console()
    print_estimate(found, console=console)
    if traced is not None:
        from sppo.cli.output.trace_table import print_trace

        print_trace(traced, console=console)
    if baselines:
        print_baselines(baselines, length=found.run.sequence.length, console=console)
