"""``sppo simulate``: times, memory and plots of a schedule, without running it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sppo.cli.arguments.common import Json
from sppo.cli.arguments.simulate_request import read_request, sort_words
from sppo.cli.command_group import CommandGroup, KeyCommand
from sppo.cli.exit_codes import exit_codes
from sppo.cli.output.printing import emit, say_written
from sppo.cli.output.simulation import SimulationReport
from sppo.output_file import check_output_files, write_text
from sppo.plots.chrome_trace import write_trace
from sppo.plots.timeline import write_png
from sppo.schedule.abstract import AbstractCase
from sppo.schedule.program_text import format_program
from sppo.schedule.simulation.simulate import simulate as play

_OUTPUT = "Output"

app = CommandGroup()


class SimulateCommand(KeyCommand):
    """Command whose keys are those of an abstract case."""

    keys = AbstractCase


@app.command("simulate", cls=SimulateCommand)
def simulate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN.yaml|PLAN.json] [SECTION.KEY=VALUE|KEY=VALUE]... [NAME]...",
            help="A run file and values that replace its own, a plan, or keys of an abstract case; "
            "names of more schedules to compare with.",
            show_default=False,
        ),
    ] = None,
    program: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A program written by hand, one line per rank: 'rank 0: 0F0.0 0B0.0'. The keys "
            "of costs apply; offload_ratio is full if left out.",
        ),
    ] = None,
    forward_only: Annotated[
        bool, typer.Option("--forward-only", help="Simulate an evaluation.")
    ] = False,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME...", help="The same work under other schedules, drawn below the first."
        ),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A plot.", rich_help_panel=_OUTPUT)
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A Chrome trace to zoom into, for Perfetto (ui.perfetto.dev) or chrome://tracing.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    write_program: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The program as text, to edit by hand.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """Simulate, check and draw a pipeline schedule before it runs.

    A run file and a plan have costs of their machine. In an abstract case one F of one subsequence
    on one stage takes 1 unit of time and leaves 1 unit of memory, if the keys below do not say
    otherwise. The bubble fraction is all idle time over ranks x makespan.

        sppo simulate schedule=sppo ranks=4 sequences=1 subsequences=8 --compare gpipe
        sppo simulate schedule=sppo_msp ranks=4 sequences=1 subsequences=8 --png msp.png
        sppo simulate run.yaml sequence.length=64Ki --trace trace.json
        sppo simulate --program by_hand.txt latency=0.1
    """
    with exit_codes():
        sorted_words = sort_words(words or ())
        check_output_files(
            {"--png": png, "--trace": trace, "--write-program": write_program},
            plots=["--png"],
            inputs=[path for path in (sorted_words.file, program) if path is not None],
        )
        request = read_request(
            sorted_words, program=program, compare=compare or (), forward_only=forward_only
        )
        timelines = [play(case.schedule, costs=case.costs) for case in request.cases]
        alone = play(request.forward.schedule, costs=request.forward.costs)
        if png is not None:
            write_png(png, timelines=timelines, is_abstract=request.devices is None)
        if trace is not None:
            write_trace(trace, timelines=timelines)
        if write_program is not None:
            write_text(write_program, format_program(timelines[0].schedule))
        report = SimulationReport(timelines, alone.makespan_s, request.devices)
        emit(report, as_json=json_output)
        if not json_output:
            say_written(png, trace, write_program)
