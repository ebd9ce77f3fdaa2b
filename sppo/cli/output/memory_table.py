"""Memory of pipeline ranks in text form: a bar per group of ranks, and a table of buckets."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sppo.cli.output.memory_groups import (
    BUCKETS,
    FREE,
    RankGroup,
    memory_bar,
    rank_groups,
    shown_groups,
)
from sppo.cli.output.solve_text import TIER_NAMES
from sppo.cost.candidate import Candidate
from sppo.cost.memory.tier_memory import tier_buckets
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.report.lines import print_line
from sppo.units import format_bytes

_MOST_GROUPS = 4
_BAR_WIDTH = 56
_COLOURS = {
    "W": "blue",
    "G": "cyan",
    "O": "magenta",
    "K": "green",
    "D": "yellow",
    "A": "red",
    "C": "bright_red",
    "L": "white",
    "R": "bright_blue",
    "M": "bright_magenta",
    "P": "bright_yellow",
    "N": "bright_cyan",
}


def print_memory(evaluated: EvaluatedCandidate, *, console: Console) -> None:
    """Print bars and buckets of one device per rank; ranks with equal memory share a column."""
    groups, candidate = rank_groups(evaluated.memory), evaluated.candidate
    shown = shown_groups(groups, most=_MOST_GROUPS)
    budget = candidate.workload.hardware.device.usable_bytes
    print_line(
        f"memory of one device of each rank; the line is its budget, {format_bytes(budget)}",
        console,
    )
    width = max(len(group.name) for group in shown)
    scale = max(budget, *(group.memory.device.total_bytes for group in shown))
    for group in shown:
        bar = memory_bar(
            group.memory.device, budget_bytes=budget, scale_bytes=scale, width=_BAR_WIDTH
        )
        line = Text(f" {group.name:<{width}} ").append(_coloured(bar))
        line.append(f" {format_bytes(group.memory.device.total_bytes)}")
        console.print(line, highlight=False, soft_wrap=True)
    console.print(_bucket_table(shown, candidate=candidate))
    hidden = len(groups) - len(shown)
    if hidden:
        console.print(f"and {hidden} more kinds of ranks; --json lists all", highlight=False)


def _coloured(bar: str) -> Text:
    text = Text()
    for cell in bar:
        text.append(cell, style=_COLOURS.get(cell, "dim" if cell == FREE else "bold"))
    return text


def _bucket_table(groups: Sequence[RankGroup], *, candidate: Candidate) -> Table:
    """Return a table of non-empty buckets, the totals, and the bytes in tiers after the device."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("")
    for group in groups:
        table.add_column(group.name, justify="right")

    def add(letter: str, label: str, amounts: list[int]) -> None:
        if any(amounts):
            table.add_row(letter, label, *map(format_bytes, amounts))

    held = [group.memory for group in groups]
    for bucket in BUCKETS:
        add(bucket.letter, bucket.label, [bucket.bytes_of(each.device) for each in held])
    table.add_section()
    add("", "one device", [each.device.total_bytes for each in held])
    for place in ("host", "disk"):
        behind = [
            tier_buckets(each, place, activations=candidate.tier, state=candidate.state)
            for each in held
        ]
        for name in behind[0]:
            add("", f"{name} in {TIER_NAMES[place]}", [buckets[name] for buckets in behind])
    return table
