"""``sppo estimate``: memory of a run as it stands, bucket by bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from sppo.cli.arguments import Json, Overrides, RunFile
from sppo.cli.exit_codes import exit_codes

if TYPE_CHECKING:
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
    json_output: Json = False,
) -> None:
    """Predict memory by bucket, as training would plan the run on this machine; nothing is run.

    Degrees left out are those that solve recommends. Needs neither data nor weights nor the
    machine. A policy of auto is what fits.

        sppo estimate configs/run/gpt_7b_512k_32gpu.yaml sequence.length=4Mi
        sppo estimate configs/run/gpt_7b_512k_32gpu.yaml --baselines
    """
    with exit_codes():
        from sppo.cli.run_hardware import run_hardware
        from sppo.config import load_run
        from sppo.planning.estimate import estimate as estimate_run

        run = load_run(run_file, overrides or ())
        found = estimate_run(run, hardware=run_hardware(run))
        rows = _baselines(found) if compare else ()
    _print(found, baselines=rows, as_json=json_output)


def _baselines(found: Estimate) -> tuple[Baseline, ...]:
    from sppo.planning.baselines import baselines

    return baselines(found.run, hardware=found.hardware)


def _print(found: Estimate, *, baselines: tuple[Baseline, ...], as_json: bool) -> None:
    """One JSON object, or tables for people."""
    if as_json:
        import json

        from sppo.cli.output.estimate_json import estimate_report

        typer.echo(json.dumps(estimate_report(found, baselines=baselines), allow_nan=False))
        return
    from rich.console import Console

    from sppo.cli.output.estimate_tables import print_baselines, print_estimate

    console = Console()
    print_estimate(found, console=console)
    if baselines:
        print_baselines(baselines, console=console)
