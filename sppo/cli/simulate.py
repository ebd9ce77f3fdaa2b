"""``sppo simulate``: times, memory and plots of a schedule, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from sppo.cli.arguments import simulate_options as options
from sppo.cli.arguments.common import Json
from sppo.cli.arguments.simulate_request import Flags, Simulation, read_request, sort_targets
from sppo.cli.exit_codes import exit_codes
from sppo.output_file import check_output_files, write_text

if TYPE_CHECKING:
    from sppo.cli.arguments.simulate_request import SimulatedDevices
    from sppo.schedule.timeline import Timeline


def simulate(
    targets: options.Targets = None,
    schedule: options.ScheduleName = None,
    program: options.Program = None,
    ranks: options.Ranks = None,
    virtual: options.Virtual = None,
    sequences: options.Sequences = None,
    subsequences: options.Subsequences = None,
    hop: options.Hop = None,
    forward_only: options.ForwardOnly = False,
    compare: options.Compare = None,
    forward: options.Forward = None,
    backward: options.Backward = None,
    weight: options.Weight = None,
    unit_costs: options.UnitCosts = None,
    unit_sizes: options.UnitSizes = None,
    latency: options.Latency = None,
    bandwidth: options.Bandwidth = None,
    message_size: options.MessageSize = None,
    weight_size: options.WeightSize = None,
    kv_size: options.KvSize = None,
    offload_ratio: options.OffloadRatio = None,
    d2h: options.D2H = None,
    h2d: options.H2D = None,
    keep_last: options.KeepLast = None,
    prefetch: options.Prefetch = None,
    png: options.Png = None,
    trace: options.Trace = None,
    write_program: options.WriteProgram = None,
    json_output: Json = False,
) -> None:
    """Simulate, check and draw a pipeline schedule before it runs.

    With abstract costs, one F of one subsequence on one stage takes 1 unit of time and leaves 1
    unit of memory. The bubble fraction is all idle time over ranks x makespan.

        sppo simulate --schedule sppo --ranks 4 --sequences 1 --subsequences 8 --compare gpipe
        sppo simulate --schedule sppo_msp --ranks 4 --sequences 1 --subsequences 8 --png msp.png
        sppo simulate --program by_hand.txt --trace by_hand.json
    """
    flags = Flags(
        schedule=schedule,
        program=program,
        ranks=ranks,
        virtual=virtual,
        sequences=sequences,
        subsequences=subsequences,
        hop=hop,
        forward_only=forward_only,
        forward=forward,
        backward=backward,
        weight=weight,
        unit_costs=unit_costs,
        unit_sizes=unit_sizes,
        latency=latency,
        bandwidth=bandwidth,
        message_size=message_size,
        weight_size=weight_size,
        kv_size=kv_size,
        offload_ratio=offload_ratio,
        d2h=d2h,
        h2d=h2d,
        keep_last=keep_last,
        prefetch=prefetch,
    )
    wanted = _Outputs(png, trace, write_program, json_output)
    with exit_codes():
        _simulate(flags, targets=targets or (), compare=compare or (), wanted=wanted)


@dataclass(frozen=True, slots=True)
class _Outputs:
    """Files to write, and whether to print JSON."""

    png: Path | None
    trace: Path | None
    program: Path | None
    as_json: bool


def _simulate(
    flags: Flags, *, targets: Sequence[str], compare: Sequence[str], wanted: _Outputs
) -> None:
    """Simulate, write the files, then print. A request that fails prints nothing."""
    sorted_targets = sort_targets(targets)
    _check_outputs(wanted, inputs=(sorted_targets.run_file, flags.program))
    request = read_request(sorted_targets, flags=flags, compare=compare)
    timelines, forward_makespan_s = _play(request)
    _draw(timelines, wanted=wanted, is_abstract=request.devices is None)
    if wanted.program is not None:
        from sppo.schedule.program_text import format_program

        write_text(wanted.program, format_program(timelines[0].schedule))
    _print(
        timelines,
        forward_makespan_s=forward_makespan_s,
        as_json=wanted.as_json,
        devices=request.devices,
    )
    if not wanted.as_json:
        from sppo.cli.output.written import say_written

        say_written(wanted.png, wanted.trace, wanted.program)


def _check_outputs(wanted: _Outputs, *, inputs: Sequence[Path | None]) -> None:
    """Raise an error if an output file cannot be written, before anything is simulated."""
    check_output_files(
        {
            "--png": wanted.png,
            "--trace": wanted.trace,
            "--write-program": wanted.program,
        },
        plots=["--png"],
        inputs=[path for path in inputs if path is not None],
    )


def _play(request: Simulation) -> tuple[list[Timeline], float | None]:
    """Simulate all cases; return their timelines and the makespan of the forward alone."""
    from sppo.schedule.simulation.simulate import simulate as play

    timelines = [play(case.schedule, costs=case.costs) for case in request.cases]
    if request.forward is None:
        return timelines, None
    alone = play(request.forward.schedule, costs=request.forward.costs)
    return timelines, alone.makespan_s


def _draw(timelines: Sequence[Timeline], *, wanted: _Outputs, is_abstract: bool) -> None:
    """Write the requested plots."""
    if wanted.png is not None:
        from sppo.plots.timeline import write_png

        write_png(wanted.png, timelines=timelines, is_abstract=is_abstract)
    if wanted.trace is not None:
        from sppo.timeline.chrome_trace import write_trace

        write_trace(wanted.trace, timelines=timelines)


def _print(
    timelines: Sequence[Timeline],
    *,
    forward_makespan_s: float | None,
    as_json: bool,
    devices: SimulatedDevices | None,
) -> None:
    """Print one JSON object, or tables."""
    if not as_json:
        from sppo.cli.output.simulate_table import print_tables

        print_tables(timelines, forward_makespan_s=forward_makespan_s, devices=devices)
        return
    import json

    from sppo.cli.output.simulate_table import device_total_bytes
    from sppo.timeline.report import timeline_report

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
    if forward_makespan_s is not None:
        report["forward_makespan_s"] = forward_makespan_s
    if len(timelines) > 1:
        report["compare"] = [timeline_report(timeline) for timeline in timelines[1:]]
    typer.echo(json.dumps(report))
