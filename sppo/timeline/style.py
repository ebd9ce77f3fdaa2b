"""Style that all plots of a timeline share: colours, labels, and which end of MSP a shard is.

Colours tell kinds apart also for colour-blind readers (Paul Tol's bright scheme); idle stretches
are pale, one colour per cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from sppo.schedule.actions import Action, ActionKind, Schedule, Wire
from sppo.schedule.timeline import IdleCause, Timeline
from sppo.units import counted, format_duration

Phase = Literal["left", "right"]
Copy = tuple[ActionKind, Wire | None]
"""Kind and wire of a copy."""

KIND_COLOURS: dict[ActionKind, str] = {
    ActionKind.F: "#4477AA",
    ActionKind.B: "#228833",
    ActionKind.W: "#B8A21F",
    ActionKind.KV: "#AA3377",
    ActionKind.D2H: "#66CCEE",
    ActionKind.H2D: "#EE6677",
    ActionKind.REDUCE: "#777777",
    ActionKind.SEND: "#BBBBBB",
}
KIND_NAMES: dict[ActionKind, str] = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.W: "weight gradients",
    ActionKind.KV: "K and V recomputed",
    ActionKind.D2H: "copy out",
    ActionKind.H2D: "copy back",
    ActionKind.REDUCE: "reduce gradients",
    ActionKind.SEND: "message",
}
OTHER_COPY_COLOURS: dict[Copy, str] = {
    (ActionKind.D2H, "kv"): "#1B7A9C",
    (ActionKind.H2D, "kv"): "#9E1F3D",
    (ActionKind.H2D, "weights"): "#E8A13A",
    (ActionKind.D2H, "gradients"): "#5B6BB0",
    (ActionKind.H2D, "gradients"): "#B5651D",
}
"""Copies of K and V, of weights and of gradients, beside those of saved tensors."""
OTHER_COPY_NAMES: dict[Copy, str] = {
    (ActionKind.D2H, "kv"): "K and V out",
    (ActionKind.H2D, "kv"): "K and V back",
    (ActionKind.H2D, "weights"): "weights in",
    (ActionKind.D2H, "gradients"): "gradients out",
    (ActionKind.H2D, "gradients"): "gradients back",
}
# Every second stage of a rank, or every second sequence of samples; shards of an MSP unit by phase.
SECOND_COLOURS: dict[ActionKind, str] = {
    ActionKind.F: "#8FB4D9",
    ActionKind.B: "#7BBF87",
    ActionKind.W: "#D9CC7A",
    ActionKind.KV: "#CC7FA6",
}
PHASE_COLOURS: dict[tuple[ActionKind, Phase], str] = {
    (ActionKind.F, "left"): "#23B5A6",
    (ActionKind.B, "left"): "#11776C",
    (ActionKind.F, "right"): "#9B7FD1",
    (ActionKind.B, "right"): "#5F3F9E",
}
PHASE_NAMES: dict[Phase, str] = {
    "left": "cut over ranks that have not begun (MSP left)",
    "right": "cut over ranks that are done (MSP right)",
}
IDLE_COLOURS: dict[IdleCause, str] = {
    "bubble": "#E6E6E6",
    "communication": "#F6D98B",
    "copy": "#F5B5B0",
}
IDLE_NAMES: dict[IdleCause, str] = {
    "bubble": "idle: bubble",
    "communication": "idle: waits for a message",
    "copy": "idle: waits for a copy",
}
DARK_TEXT_ON = frozenset({"#8FB4D9", "#7BBF87", "#D9CC7A", "#D08BB4", "#66CCEE"})


def phases(schedule: Schedule) -> dict[tuple[int, int | None, int | None], Phase]:
    """Return which bubble every unit cut by MSP fills, by (stage, sequence, subsequence).

    A left unit runs on its owner and the ranks behind it, a right one on those before it.
    """
    found: dict[tuple[int, int | None, int | None], Phase] = {}
    for rank, program in enumerate(schedule.programs):
        for action in program:
            owner = schedule.placement.rank_of(action.stage)
            if action.num_shards > 1 and action.kind is ActionKind.F and rank != owner:
                key = (action.stage, action.sequence, action.subsequence)
                found[key] = "left" if rank > owner else "right"
    return found


def colour_of(
    action: Action,
    *,
    schedule: Schedule,
    phases: Mapping[tuple[int, int | None, int | None], Phase],
) -> str:
    """The colour of an action, dark or light by turns, see :func:`shades`."""
    copy = other_copy(action)
    if copy is not None:
        return OTHER_COPY_COLOURS[copy]
    if action.num_shards > 1:
        phase = phases.get((action.stage, action.sequence, action.subsequence))
        if phase is not None and (action.kind, phase) in PHASE_COLOURS:
            return PHASE_COLOURS[action.kind, phase]
    if schedule.placement.num_virtual > 1:
        turn = action.stage // schedule.num_ranks
    else:
        turn = (action.sequence or 0) * (shades(schedule) is not None)
    if turn % 2 == 1 and action.kind in SECOND_COLOURS:
        return SECOND_COLOURS[action.kind]
    return KIND_COLOURS[action.kind]


def shades(schedule: Schedule) -> str | None:
    """Return what light colours stand for; None where all is dark.

    Stages of a rank alternate, and where each has one the sequences of a step whose samples were
    packed: those differ in length.
    """
    if schedule.placement.num_virtual > 1:
        return "every 2nd stage of a rank"
    are_alike = all(lengths == schedule.lengths[0] for lengths in schedule.lengths)
    return None if are_alike else "every 2nd sequence"


def other_copy(action: Action) -> Copy | None:
    """Kind and wire of an action that copies something else than saved tensors; None of others."""
    copy = action.kind, action.wire
    return copy if copy in OTHER_COPY_COLOURS else None


def name_of(action: Action) -> str:
    """Return what an action does, in the words of the legend."""
    copy = other_copy(action)
    return KIND_NAMES[action.kind] if copy is None else OTHER_COPY_NAMES[copy]


def unit_label(action: Action, *, schedule: Schedule) -> str:
    """The unit as a bar shows it: the sequence only where there are several."""
    if action.sequence is None:
        return ""
    if schedule.num_sequences == 1:
        return str(action.subsequence)
    if max(map(len, schedule.lengths)) == 1:
        return str(action.sequence)
    return f"{action.sequence}.{action.subsequence}"


def title(timeline: Timeline, *, is_abstract: bool) -> str:
    """Return one line that says what a panel shows and its main numbers.

    Args:
        timeline: of the panel.
        is_abstract: its times are multiples of one forward, not seconds.
    """
    schedule = timeline.schedule
    peak = max(track.peak_in_flight for track in timeline.ranks)
    stages = f", {schedule.num_stages} stages" if schedule.num_stages > schedule.num_ranks else ""
    counts = sorted({len(parts) for parts in schedule.lengths})
    took = duration(timeline.makespan_s, is_abstract=is_abstract)
    parts = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return (
        f"{schedule.name}: {counted(schedule.num_ranks, 'rank')}{stages}, "
        f"{counted(schedule.num_sequences, 'sequence')} of {parts} "
        f"subsequence{'' if parts == '1' else 's'} · {timeline.provenance} step "
        f"{took} · idle {timeline.bubble_fraction:.1%} · "
        f"at most {peak:.4g} units in flight"
    )


def duration(value: float, *, is_abstract: bool) -> str:
    """A time with its unit, which an abstract one has not: it is a multiple of one forward."""
    return f"{value:.4g}" if is_abstract else format_duration(value)
