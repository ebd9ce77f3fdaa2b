"""Memory of pipeline ranks as text: a bar of letters per group of ranks, and a table of buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from sppo.cli.output.printing import say, table
from sppo.cost.candidate import Candidate
from sppo.cost.memory.bucket_labels import BUCKETS
from sppo.cost.memory.stage_memory import MemoryBuckets, StageMemory
from sppo.cost.memory.tier_memory import tier_buckets
from sppo.hardware.description import Tier
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.units import format_bytes

TIER_NAMES: Mapping[Tier, str] = {
    "device": "the device",
    "host": "host memory",
    "disk": "a file on the disk",
}
FREE = "·"
BUDGET_LINE = "│"
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
    say(
        console,
        f"memory of one device of each rank; the line is its budget, {format_bytes(budget)}",
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
    rows = _bucket_rows([group.memory for group in shown], candidate=candidate)
    console.print(table(["", "", *(group.name for group in shown)], rows, left=2))
    hidden = len(groups) - len(shown)
    if hidden:
        say(console, f"and {hidden} more kinds of ranks; --json lists all")


def _coloured(bar: str) -> Text:
    text = Text()
    for cell in bar:
        text.append(cell, style=_COLOURS.get(cell, "dim" if cell == FREE else "bold"))
    return text


def _bucket_rows(
    held: Sequence[StageMemory], *, candidate: Candidate
) -> Iterator[Sequence[str] | None]:
    """Yield rows of the non-empty buckets, the totals, and the bytes in tiers after the device."""

    def row(letter: str, label: str, amounts: list[int]) -> Iterator[Sequence[str]]:
        if any(amounts):
            yield [letter, label, *map(format_bytes, amounts)]

    for bucket in BUCKETS:
        yield from row(bucket.letter, bucket.label, [bucket.bytes_of(each.device) for each in held])
    yield None
    yield from row("", "one device", [each.device.total_bytes for each in held])
    for place in ("host", "disk"):
        behind = [
            tier_buckets(each, place, activations=candidate.tier, state=candidate.state)
            for each in held
        ]
        for name in behind[0]:
            label = f"{name} in {TIER_NAMES[place]}"
            yield from row("", label, [buckets[name] for buckets in behind])


def host_memory_text(device_bytes: int, *, node_bytes: int) -> str:
    """Return the peak host memory of the device that uses most of it, and of a node, in words."""
    return (
        f"host memory: {format_bytes(device_bytes)} for the device that uses most, at most "
        f"{format_bytes(node_bytes)} for a node"
    )


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Neighbouring pipeline ranks with equal memory.

    Attributes:
        first: First rank of the group.
        last: Last rank of the group.
        memory: Memory of each rank of the group.
    """

    first: int
    last: int
    memory: StageMemory

    @property
    def name(self) -> str:
        """Name of the group: ``rank 0`` or ``ranks 1-6``."""
        if self.first == self.last:
            return f"rank {self.first}"
        return f"ranks {self.first}-{self.last}"


def rank_groups(memory: Sequence[StageMemory]) -> tuple[RankGroup, ...]:
    """Group neighbouring ranks with equal memory."""
    groups: list[RankGroup] = []
    for rank, held in enumerate(memory):
        if groups and groups[-1].memory == held:
            groups[-1] = RankGroup(groups[-1].first, rank, held)
        else:
            groups.append(RankGroup(rank, rank, held))
    return tuple(groups)


def shown_groups(groups: Sequence[RankGroup], *, most: int) -> tuple[RankGroup, ...]:
    """Return at most `most` groups in order: the first, the last, and the fullest others."""
    if len(groups) <= most:
        return tuple(groups)
    by_size = sorted(groups[1:-1], key=lambda g: g.memory.device.total_bytes, reverse=True)
    chosen = (groups[0], *by_size[: most - 2], groups[-1])
    return tuple(sorted(chosen, key=lambda group: group.first))


def memory_bar(device: MemoryBuckets, *, budget_bytes: int, scale_bytes: int, width: int) -> str:
    """Return the memory of one device as a bar of letters, with a line where the budget ends.

    Args:
        device: Memory of the device by bucket.
        budget_bytes: Memory that may be used.
        scale_bytes: Bytes that the whole width stands for; at least the budget and the total.
        width: Characters of the bar, without the line.
    """
    assert scale_bytes >= max(budget_bytes, 1), "the budget is on the bar"
    cells, filled = "", 0
    for bucket in BUCKETS:
        filled += bucket.bytes_of(device)
        cells += bucket.letter * (round(filled / scale_bytes * width) - len(cells))
    budget = round(budget_bytes / scale_bytes * width)
    cells += FREE * (budget - len(cells))
    return f"{cells[:budget]}{BUDGET_LINE}{cells[budget:]}"
