"""Style shared by all plots of a timeline: colours, labels, and the bubble that an MSP unit fills.

Colour-blind readers can tell the colours of kinds apart (Paul Tol's bright scheme); idle intervals
are pale, one colour per cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from sppo.schedule.actions import Action, ActionKind, Wire
from sppo.schedule.schedule import Schedule
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
"""Colours of copies of K and V, of weights and of gradients, as opposed to saved tensors."""
OTHER_COPY_NAMES: dict[Copy, str] = {
    (ActionKind.D2H, "kv"): "K and V out",
    (ActionKind.H2D, "kv"): "K and V back",
    (ActionKind.H2D, "weights"): "weights in",
    (ActionKind.D2H, "gradients"): "gradients out",
    (ActionKind.H2D, "gradients"): "gradients back",
}
# SECOND_COLOURS: every second stage of a rank, or every second sequence (see `shades`);
# PHASE_COLOURS: shards of an MSP unit.
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

    A left unit runs on its owner and on later ranks, a right unit on its owner and earlier ranks.
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
    """Return the colour of an action; stages or sequences alternate in shade (:func:`shades`)."""
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
    """Return the meaning of light colours; None if there are no light colours.

    Light and dark colours alternate over the stages of a rank. With one stage per rank they
    alternate over the sequences, if these differ in their lengths, as packed samples do.
    """
    if schedule.placement.num_virtual > 1:
        return "every 2nd stage of a rank"
    are_alike = all(lengths == schedule.lengths[0] for lengths in schedule.lengths)
    return None if are_alike else "every 2nd sequence"


def other_copy(action: Action) -> Copy | None:
    """Return kind and wire of a copy other than of saved tensors; None for all other actions."""
    copy = action.kind, action.wire
    return copy if copy in OTHER_COPY_COLOURS else None


def name_of(action: Action) -> str:
    """Return the name of an action in the legend."""
    copy = other_copy(action)
    return KIND_NAMES[action.kind] if copy is None else OTHER_COPY_NAMES[copy]


def unit_label(action: Action, *, schedule: Schedule) -> str:
    """Return the label of an action's unit; it names the sequence only if there are several."""
    if action.sequence is None:
        return ""
    if schedule.num_sequences == 1:
        return str(action.subsequence)
    if max(map(len, schedule.lengths)) == 1:
        return str(action.sequence)
    return f"{action.sequence}.{action.subsequence}"


def title(timeline: Timeline, *, is_abstract: bool) -> str:
    """Return one line with the schedule, the size and the main numbers of a panel.

    Args:
        timeline: Timeline of the panel.
        is_abstract: Whether times are multiples of one forward instead of seconds.
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
        f"{in_flight(peak)}"
    )


def in_flight(peak: float) -> str:
    """Return the number of units at once as text; shards of MSP are fractions of a unit."""
    if peak == int(peak):
        return f"at most {peak:.0f} units in flight"
    return f"at most {peak:.1f} units in flight, shards counted in part"


def duration(value: float, *, is_abstract: bool) -> str:
    """Return a time with its unit, or without a unit if it is a multiple of one forward."""
    return f"{value:.4g}" if is_abstract else format_duration(value)
