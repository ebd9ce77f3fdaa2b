"""Tables and JSON of ``sppo estimate --trace``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from sppo.cli.output.printing import say, table
from sppo.units import MIB, format_bytes, format_duration

if TYPE_CHECKING:
    from sppo.dry_run.streams import Moment
    from sppo.dry_run.traced_step import TracedStep

_ACTIONS = {"F": "forward", "B": "backward", "W": "weight half", "update": "around them"}
_FEW_BYTES = 16 * MIB
"""Predicted bytes below which a bucket's ratio of trace to plan is not shown."""


def trace_json(traced: TracedStep) -> dict[str, Any]:
    """Return a traced step as JSON values."""
    return {
        "rank": traced.rank,
        "num_layers": traced.num_layers,
        "traced_layers": list(traced.traced_layers) or [traced.num_layers],
        "buckets": {
            name: {"predicted_bytes": predicted, "traced_bytes": held}
            for name, (predicted, held) in traced.buckets.items()
        },
        "fullest": traced.fullest._asdict(),
        "traced_fullest": [moment._asdict() for moment in traced.traced_fullest],
        "actions": {kind: asdict(counts) for kind, counts in traced.actions.items()},
        "host_waits": dict(traced.host_waits),
        "launches": dict(traced.kernels),
        "attention_backend": traced.backend,
        "streams": traced.num_streams,
        "seconds": traced.seconds,
    }


def print_trace(traced: TracedStep, *, console: Console) -> None:
    """Print traced memory by bucket beside the plan's, and calls, launches and host waits."""
    console.print()
    layers = f"{traced.num_layers} layers"
    if traced.traced_layers:
        few, more = traced.traced_layers
        layers += f", extrapolated from {few} and {more}"
    say(
        console,
        f"traced: rank {traced.rank}, {layers}, attention as of {traced.backend}, in "
        f"{format_duration(traced.seconds)}",
    )
    console.print(table(["device memory", "plan", "trace", "trace / plan"], _memory_rows(traced)))
    say(console, _fullest(traced))
    actions = (
        [
            _ACTIONS.get(kind, kind),
            str(counts.num_actions),
            f"{counts.operations:,.0f}",
            f"{counts.launches:,.0f}",
        ]
        for kind, counts in traced.actions.items()
        if counts.operations
    )
    console.print(table(["each", "in a step", "calls of torch", "launches"], actions))
    waits = ", ".join(f"{count} x {where}" for where, count in traced.host_waits.items())
    say(console, f"the host waits for the GPU: {waits or 'never'}; streams: {traced.num_streams}")


def _fullest(traced: TracedStep) -> str:
    """Return when the most memory is used, and when in the traced numbers of layers, as text."""
    text = f"most is used in {_moment(traced.fullest)}"
    for layers, moment in zip(traced.traced_layers, traced.traced_fullest, strict=True):
        if moment != traced.fullest:
            text += f"; with {layers} layers in {_moment(moment)}"
    return text


def _moment(moment: Moment) -> str:
    return f"{moment.action}, {moment.function}"


def _memory_rows(traced: TracedStep) -> Iterator[Sequence[str] | None]:
    for name, (predicted, held) in traced.buckets.items():
        if name == "all":
            yield None
        ratio = f"{held / predicted:.3f}" if predicted >= _FEW_BYTES else ""
        yield [name, format_bytes(predicted), format_bytes(held), ratio]
