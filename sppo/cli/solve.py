"""``sppo solve``: the fastest way to run a model on a machine, found by prediction alone."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from sppo.api import find_solution, plan_of
from sppo.cli.arguments import Json, Overrides, RunFile
from sppo.cli.exit_codes import NO_PLAN, exit_codes
from sppo.cli.printing import emit, print_json, working
from sppo.cli.solve_corpus import corpus_json, corpus_screen
from sppo.cli.solve_report import Answer, launch_commands
from sppo.cli.solve_stream import stream_json, stream_screen
from sppo.config import load_run
from sppo.output_file import check_output_files, write_json
from sppo.planning.corpus.search import CorpusSolution
from sppo.planning.improvements import Improvement, improvements
from sppo.planning.nothing_fits import NothingFitsError
from sppo.planning.plan import plan_json

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
        check_output_files({"-o": output}, plans=["-o"], inputs=[run_file])
        run = load_run(run_file, overrides or [])
        try:
            with working("searching for the fastest plan"):
                solution = find_solution(run, lengths=lengths)
        except NothingFitsError as error:
            if not json_output:
                raise
            print_json(_values(Answer(error.solution, changes=error.changes)))
            raise typer.Exit(NO_PLAN) from None
        if output is not None:
            write_json(output, plan_json(plan_of(solution)))
        paying: Sequence[Improvement] | None = () if explain else None
        if explain and not isinstance(solution, CorpusSolution):
            with working("comparing with what was not asked for"):
                paying = improvements(solution)
        plan = str(output or "plan.json")
        train = shlex.join(["sppo", "train", str(run_file), *(overrides or []), "--plan", plan])
        assert solution.best is not None, "find_solution raises if nothing fits"
        per_node = solution.hardware.node.num_devices
        launch = launch_commands(solution.best.degrees, devices_per_node=per_node, train=train)
        answer = Answer(solution, (), train, launch, output, paying)
        screen = corpus_screen if isinstance(solution, CorpusSolution) else stream_screen
        emit(partial(_values, answer), partial(screen, answer), as_json=json_output)


def _values(answer: Answer) -> dict[str, Any]:
    """Return an answer as JSON values."""
    of_samples = isinstance(answer.solution, CorpusSolution)
    return corpus_json(answer) if of_samples else stream_json(answer)
