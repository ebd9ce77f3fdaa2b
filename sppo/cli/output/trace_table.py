"""Text output of ``sppo estimate --trace``."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from sppo.dry_run.streams import Moment
from sppo.dry_run.traced_step import TracedStep
from sppo.report.lines import print_line
from sppo.units import MIB, format_bytes, format_duration

_ACTIONS = {"F": "forward", "B": "backward", "W": "weight half", "update": "around them"}
_FEW_BYTES = 16 * MIB
"""Predicted bytes below which a bucket's ratio of trace to plan is not shown."""


def print_trace(traced: TracedStep, *, console: Console) -> None:
    """Print traced memory by bucket beside the plan's, and calls, launches and host waits."""

    def say(text: str) -> None:
        print_line(text, console)

    console.print()
    layers = f"{traced.num_layers} layers"
    if traced.traced_layers:
        few, more = traced.traced_layers
        layers += f", extrapolated from {few} and {more}"
    say(
        f"traced: rank {traced.rank}, {layers}, attention as of {traced.backend}, in "
        f"{format_duration(traced.seconds)}"
    )
    console.print(_memory_table(traced))
    say(_fullest(traced))
    console.print(_actions_table(traced))
    waits = ", ".join(f"{count} x {where}" for where, count in traced.host_waits.items())
    say(f"the host waits for the GPU: {waits or 'never'}; streams: {traced.num_streams}")


def _fullest(traced: TracedStep) -> str:
    """Return when the most memory is used, and when in the traced numbers of layers, as text."""
    text = f"most is used in {_moment(traced.fullest)}"
    for layers, moment in zip(traced.traced_layers, traced.traced_fullest, strict=True):
        if moment != traced.fullest:
            text += f"; with {layers} layers in {_moment(moment)}"
    return text


def _moment(moment: Moment) -> str:
    return f"{moment.action}, {moment.function}"


def _memory_table(traced: TracedStep) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("device memory", no_wrap=True)
    for name in ("plan", "trace", "trace / plan"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, (predicted, held) in traced.buckets.items():
        if name == "all":
            table.add_section()
        ratio = f"{held / predicted:.3f}" if predicted >= _FEW_BYTES else ""
        table.add_row(name, format_bytes(predicted), format_bytes(held), ratio)
    return table


def _actions_table(traced: TracedStep) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("each", no_wrap=True)
    for name in ("in a step", "calls of torch", "launches"):
        table.add_column(name, justify="right", no_wrap=True)
    for kind, counts in traced.actions.items():
        if counts.operations:
            table.add_row(
                _ACTIONS.get(kind, kind),
                str(counts.num_actions),
                f"{counts.operations:,.0f}",
                f"{counts.launches:,.0f}",
            )
    return table
