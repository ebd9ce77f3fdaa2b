"""``sppo solve``: the fastest way to run a model on a machine, found by prediction alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from sppo.api import find_solution, plan_of
from sppo.cli.arguments.common import Json, Overrides, RunFile
from sppo.cli.exit_codes import NO_PLAN, exit_codes
from sppo.cli.output.candidate import train_command
from sppo.cli.output.corpus import CorpusReport, corpus_failure_json
from sppo.cli.output.printing import Report, emit, print_json, working
from sppo.cli.output.solution import SolutionReport, failure_json
from sppo.config import load_run
from sppo.output_file import check_output_files, write_json
from sppo.planning.corpus.search import CorpusSolution
from sppo.planning.improvements import improvements
from sppo.planning.nothing_fits import NothingFitsError
from sppo.planning.plan import plan_json
from sppo.plots.step import step_plot

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
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Also say where the seconds of the best step go, and why, and search for changes"
            " of the run file that would pay.",
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
        check_output_files(
            {"-o": output, "--png": png}, plots=["--png"], plans=["-o"], inputs=[run_file]
        )
        run = load_run(run_file, overrides or [])
        samples = run.data.samples == "documents"
        _check_options(samples, {"--lengths": lengths, "--png": png})
        try:
            with working("searching for the fastest plan"):
                solution = find_solution(run, lengths=lengths)
        except NothingFitsError as error:
            if not json_output:
                raise
            print_json(_failure_json(error))
            raise typer.Exit(NO_PLAN) from None
        if output is not None:
            write_json(output, plan_json(plan_of(solution)))
        train = train_command(run_file, overrides or [], output=output)
        if isinstance(solution, CorpusSolution):
            report: Report = CorpusReport(solution, train, output, png, explain)
            if png is not None and solution.best is not None:
                step_plot(solution.best.plans[0], png, source=solution.steps.source)
        else:
            paying = None
            if explain:
                with working("comparing with what was not asked for"):
                    paying = improvements(solution)
            report = SolutionReport(solution, train, output, paying)
    emit(report, as_json=json_output)


def _check_options(samples: bool, options: Mapping[str, object]) -> None:
    """Raise ValueError if an option was given that the kind of run does not have."""
    for option, value in options.items():
        if value is not None and not samples:
            raise ValueError(
                f"{option}: only of data.samples=documents, and this run has the stream; leave "
                "it out (sppo simulate draws the step of a plan)"
            )


def _failure_json(error: NothingFitsError) -> dict[str, Any]:
    if isinstance(error.solution, CorpusSolution):
        return corpus_failure_json(error.solution, changes=error.changes)
    return failure_json(error.solution, changes=error.changes)
