"""Text output of ``sppo solve`` if nothing fits: which memory is short, and what would fit."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from sppo.cli.output.memory_groups import BUCKETS, bucket_text
from sppo.cli.output.solve_tables import run_line
from sppo.cli.output.solve_text import degrees_text, rejected_groups
from sppo.cost.memory.stage_memory import MemoryBuckets
from sppo.hardware.run_hardware import hardware_line
from sppo.planning.advice import Advice, too_long_for
from sppo.planning.search.candidate_search import Rejection
from sppo.planning.search.candidates import candidate_of_subsequences
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.planning.search.solver import Solution, nearest_rejection
from sppo.report.lines import print_line
from sppo.units import format_bytes

_SHOWN_BUCKETS = 5
_SHOWN_GROUPS = 3


def print_failure(solution: Solution, *, changes: Sequence[Advice], console: Console) -> None:
    """Print why nothing fits, and the changes that would make it fit."""

    def say(text: str) -> None:
        print_line(text, console)

    nearest = nearest_rejection(solution.rejected)
    problem = "no way to divide the devices works" if nearest is None else "nothing fits"
    say(f"error: {problem}: {run_line(solution.run)}")
    say(f"on {hardware_line(solution.hardware)}")
    if nearest is not None:
        for line in _nearest_lines(solution, nearest):
            say(line)
    too_long = too_long_for(solution.run, hardware=solution.hardware)
    if too_long is not None:
        say(too_long)
    groups = rejected_groups(solution.rejected)
    if nearest is None or len(solution.rejected) > 1:
        count = len(solution.rejected)
        say(
            f"none of {count} ways to divide the devices works:"
            if count > 1
            else "the only way to divide the devices does not work:"
        )
        for group in groups[:_SHOWN_GROUPS]:
            say(f" {group.count:>3} × {group.reason}")
            if nearest is None and group.example:
                say(f"     {group.example}")
    if not changes:
        say("no smaller change was found that makes it fit")
        return
    say("what would fit (closed form):")
    table = Table(box=None, pad_edge=False, show_header=False)
    for advice in changes:
        table.add_row(f" {advice.change}", advice.effect)
    console.print(table)
    if nearest is not None and not any(
        advice.change.startswith("hardware.nodes=") for advice in changes
    ):
        say("up to 1024 of these nodes alone do not make it fit")


def _nearest_lines(solution: Solution, nearest: Rejection) -> list[str]:
    """Return lines about the memory that is short: where, by how much, and its largest buckets."""
    shortfall = nearest.shortfall
    assert shortfall is not None, "chosen for it"
    assert nearest.num_subsequences is not None, "memory is short at some N"
    lines = [
        f"nearest: {degrees_text(nearest.degrees)}, N={nearest.num_subsequences}, policy "
        f"{nearest.policy}",
        f" rank {shortfall.rank} is short by {format_bytes(shortfall.short_bytes)} of "
        f"{shortfall.place} memory: needs {format_bytes(shortfall.needed_bytes)}, "
        f"{format_bytes(shortfall.available_bytes)} are there",
    ]
    if shortfall.place != "device":
        return [*lines, f" most of it {bucket_text(shortfall.bucket)}"]
    candidate = candidate_of_subsequences(
        solution.run,
        hardware=solution.hardware,
        degrees=nearest.degrees,
        num_subsequences=nearest.num_subsequences,
        virtual_stages=nearest.virtual_stages,
    )
    return [
        *lines,
        f" {_largest_buckets(evaluate_candidate(candidate).memory[shortfall.rank].device)}",
    ]


def _largest_buckets(device: MemoryBuckets) -> str:
    by_size = sorted(BUCKETS, key=lambda bucket: -bucket.bytes_of(device))[:_SHOWN_BUCKETS]
    return ", ".join(
        f"{bucket.label} {format_bytes(bucket.bytes_of(device))}"
        for bucket in by_size
        if bucket.bytes_of(device)
    )
