"""Memory of pipeline ranks as text: a bar of letters per group of ranks, and a table of buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from rich.text import Text

from sppo.cli.printing import Screen, table
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


def memory_screen(evaluated: EvaluatedCandidate) -> Screen:
    """Yield bars and buckets of one device per rank; ranks with equal memory share a column."""
    groups, candidate = rank_groups(evaluated.memory), evaluated.candidate
    shown = shown_groups(groups, most=_MOST_GROUPS)
    budget = candidate.workload.hardware.device.usable_bytes
    yield f"memory of one device of each rank; the line is its budget, {format_bytes(budget)}"
    width = max(map(len, shown))
    scale = max(budget, *(held.device.total_bytes for held in shown.values()))
    for name, held in shown.items():
        bar = memory_bar(held.device, budget_bytes=budget, scale_bytes=scale, width=_BAR_WIDTH)
        line = Text(f" {name:<{width}} ")
        for cell in bar:
            line.append(cell, style=_COLOURS.get(cell, "dim" if cell == FREE else "bold"))
        yield line.append(f" {format_bytes(held.device.total_bytes)}")
    yield table(["", "", *shown], _bucket_rows(list(shown.values()), candidate=candidate), left=2)
    hidden = len(groups) - len(shown)
    if hidden:
        yield f"and {hidden} more kinds of ranks; --json lists all"


def _bucket_rows(
    held: Sequence[StageMemory], *, candidate: Candidate
) -> Iterator[Sequence[str] | None]:
    """Yield rows of the non-empty buckets, the totals, and the bytes in tiers after the device."""
    for bucket in BUCKETS:
        amounts = [bucket.bytes_of(each.device) for each in held]
        if any(amounts):
            yield [bucket.letter, bucket.label, *map(format_bytes, amounts)]
    yield None
    yield ["", "one device", *(format_bytes(each.device.total_bytes) for each in held)]
    for place in ("host", "disk"):
        behind = [
            tier_buckets(each, place, activations=candidate.tier, state=candidate.state)
            for each in held
        ]
        for name in behind[0]:
            amounts = [buckets[name] for buckets in behind]
            if any(amounts):
                yield ["", f"{name} in {TIER_NAMES[place]}", *map(format_bytes, amounts)]


def host_memory_text(device_bytes: int, *, node_bytes: int) -> str:
    """Return the peak host memory of the device that uses most of it, and of a node, in words."""
    return (
        f"host memory: {format_bytes(device_bytes)} for the device that uses most, at most "
        f"{format_bytes(node_bytes)} for a node"
    )


def rank_groups(memory: Sequence[StageMemory]) -> dict[str, StageMemory]:
    """Return the memory of neighbouring ranks with equal memory, by their name: ``ranks 1-6``."""
    groups = {}
    for held, members in groupby(range(len(memory)), key=memory.__getitem__):
        first, *others = members
        groups[f"ranks {first}-{others[-1]}" if others else f"rank {first}"] = held
    return groups


def shown_groups(groups: Mapping[str, StageMemory], *, most: int) -> dict[str, StageMemory]:
    """Return at most `most` groups in order: the first, the last, and the fullest others."""
    names = list(groups)
    by_size = sorted(names[1:-1], key=lambda name: groups[name].device.total_bytes, reverse=True)
    chosen = {names[0], *by_size[: most - 2], names[-1]}
    return {name: held for name, held in groups.items() if name in chosen}


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
