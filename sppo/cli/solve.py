"""``sppo solve``: the fastest way to run a model on a machine, found by prediction alone."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from sppo.api import find_solution, plan_of, planned_validation
from sppo.cli.arguments import Json, Overrides, RunFile
from sppo.cli.exit_codes import exit_codes
from sppo.cli.printing import emit, print_json, working
from sppo.cli.solution.corpus import CorpusAnswer
from sppo.cli.solution.stream import StreamAnswer
from sppo.config import RunConfig, load_run
from sppo.hardware.faults import RESTART_S
from sppo.output_file import check_output_files, write_json
from sppo.parallel.job.exit_codes import NO_PLAN
from sppo.planning.changes import Change, improvements
from sppo.planning.corpus.search import CorpusSolution, PlannedDegrees
from sppo.planning.effective_time import effective_time
from sppo.planning.nothing_fits import NothingFitsError
from sppo.planning.plan import plan_json
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.solver import Solution
from sppo.planning.validation_plan import ValidationPlan

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
            help="With data.samples=documents: draw lengths of samples from a published"
            " distribution instead of data.tokens: magi, github, commoncrawl, lognormal-1024,"
            " lognormal-768.",
        ),
    ] = None,
    restart_s: Annotated[
        float,
        typer.Option(
            "--restart-s",
            metavar="SECONDS",
            min=0,
            help="Seconds from a stop to the next step, for the effective training time.",
        ),
    ] = RESTART_S,
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
            print_json(_kind_of(error.solution)(error.solution, changes=error.changes).json())
            raise typer.Exit(NO_PLAN) from None
        if output is not None:
            write_json(output, plan_json(plan_of(solution)))
        paying: Sequence[Change] | None = () if explain else None
        if explain and not isinstance(solution, CorpusSolution):
            with working("comparing with what was not asked for"):
                paying = improvements(solution)
        plan = str(output or "plan.json")
        train = shlex.join(["sppo", "train", str(run_file), *(overrides or []), "--plan", plan])
        best = solution.best
        assert best is not None, "find_solution raises if nothing fits"
        effective = effective_time(
            run,
            hardware=solution.hardware,
            num_devices=best.degrees.num_devices,
            step_s=best.step_s,
            restart_s=restart_s,
        )
        answer = _kind_of(solution)(
            solution, (), train, output, paying, _validation(run, best), effective
        )
        emit(answer.json, answer.screen, as_json=json_output)


def _validation(run: RunConfig, best: EvaluatedCandidate | PlannedDegrees) -> ValidationPlan | None:
    """Return the plan of the run's validations on the layout of the best plan."""
    layout = best if isinstance(best, EvaluatedCandidate) else best.longest
    return planned_validation(run, layout, step_s=best.step_s)


def _kind_of(solution: Solution | CorpusSolution) -> type[StreamAnswer | CorpusAnswer]:
    """Return the class of answers with such a solution."""
    return CorpusAnswer if isinstance(solution, CorpusSolution) else StreamAnswer
