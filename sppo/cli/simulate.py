"""``sppo simulate``: times, memory and plots of a schedule, without running it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sppo.cli.arguments.common import Json
from sppo.cli.arguments.simulate_request import SimulatedDevices, read_request, sort_words
from sppo.cli.command_group import CommandGroup, KeyCommand
from sppo.cli.exit_codes import exit_codes
from sppo.cli.output.simulate_table import device_total_bytes, print_tables
from sppo.cli.show import say_written
from sppo.output_file import check_output_files, write_text
from sppo.plots.timeline import write_png
from sppo.schedule.abstract import AbstractCase
from sppo.schedule.program_text import format_program
from sppo.schedule.simulation.simulate import simulate as play
from sppo.schedule.timeline import Timeline
from sppo.timeline.chrome_trace import write_trace
from sppo.timeline.report import timeline_report

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
        if json_output:
            report = _report(timelines, forward=alone, devices=request.devices)
            typer.echo(json.dumps(report))
            return
        print_tables(timelines, forward_makespan_s=alone.makespan_s, devices=request.devices)
        say_written(png, trace, write_program)


def _report(
    timelines: Sequence[Timeline], *, forward: Timeline, devices: SimulatedDevices | None
) -> dict[str, Any]:
    """Return the JSON object of the first timeline, with the others as its comparison."""
    report = timeline_report(timelines[0])
    if devices is not None:
        report["hardware"] = devices.hardware
        report["num_devices"] = devices.num_devices
        report["chosen_by_solve"] = list(devices.chosen)
        totals = device_total_bytes(timelines[0], devices)
        report["device_total_bytes"] = totals or None
        if totals:
            # The same name has the same meaning as in solve and estimate: states are counted.
            report["saved_peak_bytes"] = report["device_peak_bytes"]
            report["device_peak_bytes"] = totals
        if devices.host_peak_bytes is not None:
            report["host_peak_bytes"] = devices.host_peak_bytes
            report["node_host_peak_bytes"] = devices.node_host_bytes
    report["forward_makespan_s"] = forward.makespan_s
    if len(timelines) > 1:
        report["compare"] = [timeline_report(timeline) for timeline in timelines[1:]]
    return report
