"""``sppo solve``: the fastest way to run a model on a machine, found by prediction alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sppo.cli.arguments.common import Json, Overrides, RunFile
from sppo.cli.exit_codes import NO_PLAN, exit_codes
from sppo.output_file import check_output_files, write_json

if TYPE_CHECKING:
    from sppo.config import RunConfig
    from sppo.planning.ablation import AblationRow
    from sppo.planning.improvements import Improvement
    from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
    from sppo.planning.search.solver import Solution

PlanOutput = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE",
        help="Write the best plan here, for sppo train --plan and sppo simulate.",
    ),
]


def solve(
    run_file: RunFile,
    overrides: Overrides = None,
    output: PlanOutput = None,
    ablation: Annotated[
        bool, typer.Option("--ablation", help="Also say what each part of SPPO is worth here.")
    ] = False,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Also say where the seconds of the best step go, and why, and show all N.",
        ),
    ] = False,
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            metavar="NAME",
            help="Of data.samples=documents: draw lengths of samples from this published"
            " distribution instead of data.tokens: magi, github, commoncrawl, lognormal-1024,"
            " lognormal-768.",
        ),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(
            "--png",
            metavar="FILE",
            help="Of data.samples=documents: draw a step: its lengths, chunks, and levels.",
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """Recommend degrees of parallelism, cuts, schedule and policy; predict time and memory.

    Keys in the run file are constraints; the solver chooses the keys that are left out. Needs
    neither the data, nor the weights, nor the machine; with data.samples=documents, steps are drawn
    from data.tokens or --lengths. If nothing fits, the command reports what would and ends with
    exit code 3.

        sppo solve configs/run/gpt_7b_512k_32gpu.yaml -o plan.json
        sppo solve configs/run/gpt_7b_512k_32gpu.yaml sequence.length=1Mi --json
        sppo solve configs/run/gpt_7b_documents_32gpu.yaml --lengths github
    """
    with exit_codes():
        from sppo.cli.output.solve_text import train_command

        check_output_files(
            {"-o": output, "--png": png}, plots=["--png"], plans=["-o"], inputs=[run_file]
        )
        run = _load(run_file, overrides or [])
        train = train_command(run_file, overrides or [], output=output)
        if run.data.samples == "documents":
            if ablation:
                raise ValueError(
                    "--ablation is of a run of the stream; of data.samples=documents other ways to "
                    "pack samples are priced without it"
                )
            from sppo.cli.solve_corpus import solve_and_print

            solve_and_print(
                run,
                lengths=lengths,
                output=output,
                train=train,
                png=png,
                explain=explain,
                as_json=json_output,
            )
            return
        for option, value in (("--lengths", lengths), ("--png", png)):
            if value is not None:
                raise ValueError(
                    f"{option}: only of data.samples=documents, and this run has the stream; leave "
                    "it out (sppo simulate draws the step of a plan)"
                )
        solution = _solution(run)
        rows = _ablation(solution) if ablation and solution.best is not None else ()
        paying = _improvements(solution) if solution.best is not None else ()
        if solution.best is not None and output is not None:
            _write_plan(solution, output)
    if solution.best is None:
        _print_failure(solution, as_json=json_output)
        raise typer.Exit(NO_PLAN)
    _print_solution(
        solution,
        rows=rows,
        paying=paying,
        explain=explain,
        output=output,
        train=train,
        as_json=json_output,
    )


def _load(run_file: Path, overrides: list[str]) -> RunConfig:
    from sppo.config import load_run
    from sppo.config.run_warnings import log_run_warnings

    run = load_run(run_file, overrides)
    log_run_warnings(run)
    return run


def _solution(run: RunConfig) -> Solution:
    from sppo.cli.output.working import working
    from sppo.hardware.run_hardware import hardware_line, run_hardware
    from sppo.planning.search.solver import solve as solve_run

    hardware = run_hardware(run)
    with working(f"comparing ways to divide {hardware_line(hardware)}"):
        return solve_run(run, hardware=hardware)


def _ablation(solution: Solution) -> tuple[AblationRow, ...]:
    from sppo.planning.ablation import ablation

    return ablation(solution.run, hardware=solution.hardware)


def _improvements(solution: Solution) -> tuple[Improvement, ...]:
    from sppo.cli.output.working import working
    from sppo.planning.improvements import improvements

    with working("comparing with what was not asked for"):
        return improvements(solution)


def _write_plan(solution: Solution, output: Path) -> None:
    from sppo.planning.make_plan import make_plan
    from sppo.planning.plan import plan_json
    from sppo.schedule.program import gc_disabled

    assert solution.best is not None, "only called with a plan to write"
    with gc_disabled():
        write_json(output, plan_json(make_plan(solution.run, solution.best)))


def _print_solution(
    solution: Solution,
    *,
    rows: tuple[AblationRow, ...],
    paying: tuple[Improvement, ...],
    explain: bool,
    output: Path | None,
    train: str,
    as_json: bool,
) -> None:
    """Print one JSON object, or tables."""
    if as_json:
        from sppo.cli.output.solve_json import solution_report

        report = solution_report(solution, paying=paying, ablation=rows, train=train, output=output)
        if explain:
            from sppo.cli.output.explain_table import explanation_report

            report["explanation"] = explanation_report(_best(solution))
        _print_json(report)
        return
    from rich.console import Console

    from sppo.cli.output.explain_table import print_explanation
    from sppo.cli.output.solve_tables import print_ablation, print_solution

    console = Console()
    print_solution(
        solution, paying=paying, output=output, train=train, console=console, whole=explain
    )
    if rows:
        print_ablation(rows, console=console)
    if explain:
        print_explanation(_best(solution), console=console)
    if output is not None:
        typer.echo(f"written {output}: sppo simulate {output}, {train}")


def _best(solution: Solution) -> EvaluatedCandidate:
    assert solution.best is not None, "_print_failure is for the other case"
    return solution.best


def _print_failure(solution: Solution, *, as_json: bool) -> None:
    """Print which memory is short and what would fit: JSON on stdout, or text on stderr."""
    from sppo.cli.output.working import working
    from sppo.hardware.run_hardware import run_hardware
    from sppo.planning.advice import what_would_fit

    with working("searching for what would fit"):
        changes = what_would_fit(solution.run, hardware=solution.hardware, machine_of=run_hardware)
    if as_json:
        from sppo.cli.output.solve_json import failure_report

        _print_json(failure_report(solution, changes=changes))
        return
    from rich.console import Console

    from sppo.cli.output.solve_failure import print_failure

    print_failure(solution, changes=changes, console=Console(stderr=True))


def _print_json(report: dict[str, Any]) -> None:
    import json

    typer.echo(json.dumps(report, allow_nan=False))
