"""``sppo solve`` with data.samples=documents: degrees for steps of samples drawn from the data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from sppo.cli.exit_codes import NO_PLAN
from sppo.output_file import write_json

if TYPE_CHECKING:
    from sppo.config import RunConfig
    from sppo.planning.advice import Advice
    from sppo.planning.corpus.search import CorpusSolution


def solve_and_print(
    run: RunConfig,
    *,
    lengths: str | None,
    output: Path | None,
    train: str,
    png: Path | None,
    explain: bool,
    as_json: bool,
) -> None:
    """Solve, write the files and print the result.

    Args:
        run: Validated run configuration.
        lengths: Name of a distribution of lengths; None draws from `data.tokens`.
        output: File to write the plan to.
        train: Command that trains by the plan.
        png: File to draw a step into.
        explain: Also print where the seconds of a step go.
        as_json: Print one JSON object instead of tables.

    Raises:
        ValueError: The request is not valid.
        OSError: A file cannot be read or written.
        typer.Exit: Nothing fits; the reason has been printed.
    """
    solution = _solution(run, lengths)
    if solution.best is None:
        _print_failure(solution, as_json=as_json)
        raise typer.Exit(NO_PLAN)
    if output is not None:
        from sppo.planning.corpus.search import plan_of_longest
        from sppo.planning.plan import plan_json

        write_json(output, plan_json(plan_of_longest(solution)))
    if png is not None:
        from sppo.plots.step import step_plot

        step_plot(solution.best.plans[0], png, source=solution.steps.source)
    _print_solution(solution, output=output, train=train, explain=explain, as_json=as_json)
    if not as_json:
        from sppo.cli.output.written import say_written

        say_written(png)


def _solution(run: RunConfig, lengths: str | None) -> CorpusSolution:
    from sppo.cli.output.working import working
    from sppo.data.samples.step_lengths import drawn_steps
    from sppo.hardware.run_hardware import hardware_line, run_hardware
    from sppo.planning.corpus.search import solve_corpus

    steps = drawn_steps(run, distribution=lengths)
    hardware = run_hardware(run)
    with working(f"planning drawn steps for {hardware_line(hardware)}"):
        return solve_corpus(run, hardware=hardware, steps=steps)


def _print_solution(
    solution: CorpusSolution, *, output: Path | None, train: str, explain: bool, as_json: bool
) -> None:
    assert solution.best is not None, "_print_failure is for the other case"
    evaluated = solution.best.plans[0].evaluated
    if as_json:
        import json

        from sppo.cli.output.corpus_json import corpus_report

        report = corpus_report(solution, train=train, output=output)
        if explain:
            from sppo.cli.output.explain_table import explanation_report

            report["explanation"] = explanation_report(evaluated)
        typer.echo(json.dumps(report, allow_nan=False))
        return
    from rich.console import Console

    from sppo.cli.output.corpus_tables import print_corpus_solution
    from sppo.cli.output.explain_table import print_explanation

    console = Console()
    print_corpus_solution(solution, output=output, train=train, console=console)
    if explain:
        print_explanation(evaluated, console=console)
    if output is not None:
        typer.echo(f"written {output}: {train}")


def _print_failure(solution: CorpusSolution, *, as_json: bool) -> None:
    """Print which memory is short, for which sample and stage: JSON on stdout or text on stderr."""
    from sppo.hardware.run_hardware import run_hardware
    from sppo.planning.advice import what_would_fit
    from sppo.planning.elastic.longest_samples import run_of_longest_samples

    changes: tuple[Advice, ...] = ()
    if not any(refused.steps for refused in solution.refused):
        changes = what_would_fit(
            run_of_longest_samples(solution.run),
            hardware=solution.hardware,
            machine_of=run_hardware,
        )
    if as_json:
        import json

        from sppo.cli.output.corpus_json import corpus_failure_report

        typer.echo(json.dumps(corpus_failure_report(solution, changes=changes), allow_nan=False))
        return
    from rich.console import Console

    from sppo.cli.output.corpus_tables import print_corpus_failure

    print_corpus_failure(solution, changes=changes, console=Console(stderr=True))
