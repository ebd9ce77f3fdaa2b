"""``sppo simulate``: times, memory and plots of a schedule, without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from sppo.api import steps_to_simulate
from sppo.cli.arguments import Json, load_planned_run
from sppo.cli.command_group import CommandGroup, key_command
from sppo.cli.exit_codes import exit_codes
from sppo.cli.printing import Screen, emit, item_table, written
from sppo.cli.solution.candidate import host_memory_text
from sppo.config.loading import read_keys
from sppo.config.problems import KEY_PATHS, nearest
from sppo.output_file import check_output_files, write_text
from sppo.planning.plan import read_plan
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.plots.chrome_trace import write_trace
from sppo.plots.timeline import write_png
from sppo.plots.timeline_report import timeline_report
from sppo.quoting import quoted
from sppo.schedule.abstract import (
    AbstractCase,
    AbstractCosts,
    abstract_case,
    case_costs,
    compared_case,
)
from sppo.schedule.costs import Costs
from sppo.schedule.orders.names import schedule_names
from sppo.schedule.program import forward_part, with_copies
from sppo.schedule.program_text import format_program, parse_program
from sppo.schedule.schedule import Schedule
from sppo.schedule.simulation.simulate import simulate as play
from sppo.schedule.timeline import RankTrack, Timeline
from sppo.text_file import read_text_file
from sppo.units import counted, format_bytes, format_duration

_MOST_PROGRAM_BYTES = 64 << 20
_RUN_FILES = (".yaml", ".yml")
_PLAN = ".json"
_SHOWN_RANKS = 16
_OUTPUT = "Output"

app = CommandGroup()


@app.command("simulate", cls=key_command(AbstractCase))
def simulate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN.yaml|PLAN.json] [SECTION.KEY=VALUE|KEY=VALUE]...",
            help="A run file and values that replace its own, a plan, or keys of an abstract case.",
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
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="The same work under another schedule, drawn below the first; may be given several"
            " times.",
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
        file, values = sort_words(words or ())
        check_output_files(
            {"--png": png, "--trace": trace, "--write-program": write_program},
            plots=["--png"],
            inputs=[path for path in (file, program) if path is not None],
        )
        found = read_request(file, values, program=program, names=compare or ())
        if png is not None:
            write_png(png, timelines=found.timelines, is_abstract=found.run is None)
        if trace is not None:
            write_trace(trace, timelines=found.timelines)
        if write_program is not None:
            write_text(write_program, format_program(found.timelines[0].schedule))
    files = (png, trace, write_program)
    emit(
        lambda: _values(found), lambda: chain(_screen(found), written(*files)), as_json=json_output
    )


@dataclass(frozen=True, eq=False)
class Simulation:
    """Schedules with costs to simulate.

    Attributes:
        cases: The requested schedule, then the schedules to compare with.
        run: Step of a run or a plan, which is the first case; None with abstract costs, in the
            user's units.
        chosen: Keys that the run leaves out and the solver chose.
    """

    cases: tuple[tuple[Schedule, Costs], ...]
    run: EvaluatedCandidate | None = None
    chosen: tuple[str, ...] = ()

    @cached_property
    def timelines(self) -> list[Timeline]:
        """Timeline of the requested schedule, then those of the schedules to compare with."""
        return [play(schedule, costs=costs) for schedule, costs in self.cases]

    @property
    def device_total_bytes(self) -> list[int]:
        """Peak memory of one device of each rank, states included; [] if not known."""
        if self.run is None:
            return []
        tracks = zip(self.timelines[0].ranks, self.run.steady_bytes, strict=True)
        return [steady + round(_peak_bytes(track)) for track, steady in tracks]

    @cached_property
    def forward_makespan_s(self) -> float:
        """Makespan of the forward alone of the requested schedule."""
        schedule, costs = self.cases[0]
        alone = with_copies(forward_part(schedule), costs=costs)
        return play(alone, costs=costs).makespan_s

    def time_text(self, seconds: float) -> str:
        """Format a time, which is in the user's units with abstract costs."""
        return f"{seconds:.6g}" if self.run is None else format_duration(seconds)

    def size_text(self, size_bytes: float) -> str:
        """Format an amount of memory, which is in the user's units with abstract costs."""
        return f"{size_bytes:.4g}" if self.run is None else format_bytes(size_bytes)


def sort_words(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Sort positional arguments by kind.

    Returns:
        (run file or plan, None for an abstract case or a program; ``KEY=VALUE`` words).

    Raises:
        ValueError: Two files, or a word of no known kind.
    """
    files, values = [], []
    for word in words:
        if word.partition("=")[0].replace(".", "_").isidentifier() and "=" in word:
            values.append(word)
        elif word.endswith((*_RUN_FILES, _PLAN)):
            files.append(Path(word))
        else:
            raise ValueError(
                f"{quoted(word)} is neither a run file (.yaml) nor a plan (.json) nor KEY=VALUE"
            )
    if len(files) > 1:
        raise ValueError(f"two files, {files[0]} and {files[1]}: simulate one at a time")
    return (files[0] if files else None), values


def read_request(
    file: Path | None, values: Sequence[str], *, program: Path | None, names: Sequence[str]
) -> Simulation:
    """Return the requested simulation.

    Args:
        file: Run file or plan; None for an abstract case or a program.
        values: ``KEY=VALUE`` words.
        program: File of a program written by hand.
        names: Names of schedules to compare with.

    Raises:
        ValueError: Arguments contradict each other or are missing; the message says what to write.
    """
    for name in names:
        if name not in schedule_names():
            raise ValueError(
                f"--compare {quoted(name)}: not one of {', '.join(schedule_names())}."
                f"{nearest(name, schedule_names())}"
            )
    if program is None:
        return _abstract(values, names=names) if file is None else _step(file, values, names=names)
    if file is not None or names:
        raise ValueError("--program simulates the file alone: leave out the run file and --compare")
    return _program(program, values)


def _abstract(values: Sequence[str], *, names: Sequence[str]) -> Simulation:
    if not values:
        raise ValueError(
            "nothing to simulate: give RUN.yaml or plan.json, or schedule=NAME ranks=P "
            "sequences=M subsequences=N, or --program FILE"
        )
    for word in values:
        if "." in word.partition("=")[0]:
            raise ValueError(f"{quoted(word)} changes a run file, but none is given")
    request = read_keys(AbstractCase, values)
    others = (compared_case(request, name=name) for name in names)
    return Simulation((abstract_case(request), *others))


def _program(file: Path, values: Sequence[str]) -> Simulation:
    given = read_keys(AbstractCosts, values, defaults={"offload_ratio": "full"})
    text = read_text_file(file, most_bytes=_MOST_PROGRAM_BYTES)
    schedule = parse_program(text, source=str(file))
    costs = case_costs(given, num_stages=schedule.num_stages, lengths=schedule.lengths)
    return Simulation(((schedule, costs),))


def _step(file: Path, values: Sequence[str], *, names: Sequence[str]) -> Simulation:
    """Return the simulation of a step of a run or a plan, also under other schedules."""
    for word in values:
        key = word.partition("=")[0]
        if key in AbstractCase.model_fields:
            paths = KEY_PATHS.get(key, ())
            here = f"; the key of a run file is {' or '.join(paths)}" if paths else ""
            raise ValueError(
                f"{quoted(word)} belongs to an abstract case, but {file} has costs of a machine: "
                f"leave out one of them{here}"
            )
    is_plan = file.suffix == _PLAN
    if is_plan and values:
        raise ValueError(
            f"{quoted(values[0])}: a plan has fixed it; make another plan with sppo solve, or "
            "simulate the RUN.yaml"
        )
    step = read_plan(file) if is_plan else load_planned_run(file, values)
    steps, chosen = steps_to_simulate(step, schedules=names)
    cases = tuple(step.case() for step in steps)
    return Simulation(cases, steps[0], chosen)


def _values(found: Simulation) -> dict[str, Any]:
    """Return the first timeline as JSON values, with the others as its comparison."""
    values, run = timeline_report(found.timelines[0]), found.run
    if run is not None:
        totals = found.device_total_bytes
        values["hardware"] = run.candidate.workload.hardware.name_and_origin
        values["num_devices"] = run.candidate.num_devices
        values["chosen_by_solve"] = list(found.chosen)
        values["device_total_bytes"] = totals
        # The same name has the same meaning as in solve and estimate: states are counted.
        values["saved_peak_bytes"] = values["device_peak_bytes"]
        values["device_peak_bytes"] = totals
        values["host_peak_bytes"] = run.host_peak_bytes
        values["node_host_peak_bytes"] = run.node_host_bytes
    values["forward_makespan_s"] = found.forward_makespan_s
    if len(found.timelines) > 1:
        values["compare"] = [timeline_report(timeline) for timeline in found.timelines[1:]]
    return values


def _screen(found: Simulation) -> Screen:
    """Yield the step time, the idle time and its causes, and the memory of each rank."""
    yield from _lines(found)
    tracks, totals, run = found.timelines[0].ranks, found.device_total_bytes, found.run
    memory = "peak memory" if run is None else "saved + K/V"
    columns: dict[str, Callable[[int], str]] = {
        "rank": str,
        "idle": lambda rank: found.time_text(tracks[rank].idle_s()),
        "bubble": lambda rank: found.time_text(tracks[rank].idle_s("bubble")),
        "waits for messages": lambda rank: found.time_text(tracks[rank].idle_s("communication")),
        "waits for copies": lambda rank: found.time_text(tracks[rank].idle_s("copy")),
        "in flight": lambda rank: f"{round(tracks[rank].peak_in_flight, 1):.4g}",
        memory: lambda rank: found.size_text(_peak_bytes(tracks[rank])),
    }
    if totals:
        columns["one device"] = lambda rank: format_bytes(totals[rank])
    # Headings break between words, so that values stay on one line in 80 columns.
    broken = {heading.replace(" ", "\n"): cell for heading, cell in columns.items()}
    yield item_table(range(len(tracks[:_SHOWN_RANKS])), broken, left=0)
    if run is not None and run.host_peak_bytes:
        yield host_memory_text(run.host_peak_bytes, node_bytes=run.node_host_bytes)
    hidden = len(tracks) - _SHOWN_RANKS
    if hidden > 0:
        yield f"and {counted(hidden, 'more rank')}; --json lists all of them"
    if len(found.timelines) > 1:
        first_s = found.timelines[0].makespan_s
        compared: dict[str, Callable[[Timeline], str]] = {
            "schedule": lambda other: other.schedule.name,
            "step": lambda other: found.time_text(other.makespan_s),
            "against the first": lambda other: (
                f"{other.makespan_s / first_s:.2f}x" if first_s else "-"
            ),
            "idle": lambda other: f"{other.bubble_fraction:.1%}",
            memory: lambda other: found.size_text(max(map(_peak_bytes, other.ranks))),
        }
        yield item_table(found.timelines, compared)


def _lines(found: Simulation) -> Iterator[str]:
    """Yield lines about the schedule, the step time, and the machine that the costs are of."""
    first, run = found.timelines[0], found.run
    schedule = first.schedule
    ranks = counted(schedule.num_ranks, "rank")
    devices = 0 if run is None else run.candidate.num_devices
    if devices > schedule.num_ranks:
        ranks = f"{counted(schedule.num_ranks, 'pipeline rank')} on {devices} devices"
    yield (
        f"{schedule.name}: {ranks}, {counted(schedule.num_stages, 'stage')}, "
        f"{counted(schedule.num_sequences, 'sequence')}, {counted(schedule.num_units, 'unit')} "
        f"({first.provenance})"
    )
    yield (
        f"step {found.time_text(first.makespan_s)} · forward alone "
        f"{found.time_text(found.forward_makespan_s)} · idle {first.bubble_fraction:.1%} of all "
        f"rank-time ({first.bubble_ratio:.1%} of busy time)"
    )
    if run is not None:
        yield f"costs of {run.candidate.workload.hardware.name_and_origin}"
    if found.chosen:
        yield f"chosen by solve: {', '.join(found.chosen)}"


def _peak_bytes(track: RankTrack) -> float:
    return track.memory["total"].peak_bytes if track.memory else 0.0
