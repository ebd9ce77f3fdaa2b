"""Style shared by all views of a timeline: names, colours, labels and the title of a panel.

Colour-blind readers can tell the colours of kinds apart (Paul Tol's bright scheme); idle intervals
are pale, one colour per cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Literal, NamedTuple

from sppo.schedule.actions import Action, ActionKind, Wire
from sppo.schedule.schedule import Schedule
from sppo.schedule.timeline import IdleCause, Timeline
from sppo.units import counted, format_duration


class Look(NamedTuple):
    """Name of a kind of mark in the legend, and its colour."""

    name: str
    colour: str


Phase = Literal["left", "right"]
"""Bubble that a unit cut by MSP fills."""

KINDS: Mapping[ActionKind, Look] = {
    ActionKind.F: Look("forward", "#4477AA"),
    ActionKind.B: Look("backward", "#228833"),
    ActionKind.W: Look("weight gradients", "#B8A21F"),
    ActionKind.KV: Look("K and V recomputed", "#AA3377"),
    ActionKind.D2H: Look("copy out", "#66CCEE"),
    ActionKind.H2D: Look("copy back", "#EE6677"),
    ActionKind.REDUCE: Look("reduce gradients", "#777777"),
    ActionKind.SEND: Look("message", "#BBBBBB"),
}
OTHER_COPIES: Mapping[tuple[ActionKind, Wire | None], Look] = {
    (ActionKind.D2H, "kv"): Look("K and V out", "#1B7A9C"),
    (ActionKind.H2D, "kv"): Look("K and V back", "#9E1F3D"),
    (ActionKind.H2D, "weights"): Look("weights in", "#E8A13A"),
    (ActionKind.D2H, "gradients"): Look("gradients out", "#5B6BB0"),
    (ActionKind.H2D, "gradients"): Look("gradients back", "#B5651D"),
}
"""Copies of K and V, of weights and of gradients, as opposed to saved tensors, by kind and wire."""
SECOND_COLOURS: Mapping[ActionKind, str] = {
    ActionKind.F: "#8FB4D9",
    ActionKind.B: "#7BBF87",
    ActionKind.W: "#D9CC7A",
    ActionKind.KV: "#CC7FA6",
}
"""Colours of every second stage of a rank, or of every second sequence."""
SECOND_STAGES, SECOND_SEQUENCES = "every 2nd stage of a rank", "every 2nd sequence"
PHASES: Mapping[Phase, tuple[str, Mapping[ActionKind, str]]] = {
    "left": (
        "cut over ranks that have not begun (MSP left)",
        {ActionKind.F: "#23B5A6", ActionKind.B: "#11776C"},
    ),
    "right": (
        "cut over ranks that are done (MSP right)",
        {ActionKind.F: "#9B7FD1", ActionKind.B: "#5F3F9E"},
    ),
}
"""Name of each phase of MSP, and the colours of its shards."""
SHARD = Look("s1: a shard of stage 1 (MSP), on another rank", "none")
"""Explanation of the second line of a label."""
IDLE: Mapping[IdleCause, Look] = {
    "bubble": Look("idle: bubble", "#E6E6E6"),
    "communication": Look("idle: waits for a message", "#F6D98B"),
    "copy": Look("idle: waits for a copy", "#F5B5B0"),
}
LEGEND = (
    *(look.name for look in (*KINDS.values(), *OTHER_COPIES.values())),
    *(SECOND_STAGES, SECOND_SEQUENCES),
    *(name for name, _ in PHASES.values()),
    SHARD.name,
    *(look.name for look in IDLE.values()),
)
"""Names of all kinds of marks, in the order of the legend."""
DARK_TEXT_ON = frozenset({"#8FB4D9", "#7BBF87", "#D9CC7A", "#66CCEE"})


def kind(action: Action) -> Look:
    """Return the name and the colour of an action's kind."""
    return OTHER_COPIES.get((action.kind, action.wire), KINDS[action.kind])


class Style:
    """Names and colours of the actions of one schedule.

    Args:
        schedule: Schedule of the actions.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    @cached_property
    def phases(self) -> Mapping[tuple[int, int | None, int | None], Phase]:
        """Bubble that every unit cut by MSP fills, by (stage, sequence, subsequence).

        A left unit runs on its owner and on later ranks, a right unit on its owner and earlier
        ranks.
        """
        found: dict[tuple[int, int | None, int | None], Phase] = {}
        for rank, program in enumerate(self._schedule.programs):
            for action in program:
                owner = self._schedule.placement.rank_of(action.stage)
                if action.num_shards > 1 and action.kind is ActionKind.F and rank != owner:
                    key = (action.stage, action.sequence, action.subsequence)
                    found[key] = "left" if rank > owner else "right"
        return found

    @cached_property
    def _second(self) -> str | None:
        """Meaning of light colours; None if there are no light colours.

        Light and dark colours alternate over the stages of a rank. With one stage per rank they
        alternate over the sequences, if these differ in their lengths, as packed samples do.
        """
        if self._schedule.placement.num_virtual > 1:
            return SECOND_STAGES
        lengths = self._schedule.lengths
        return None if all(one == lengths[0] for one in lengths) else SECOND_SEQUENCES

    def look(self, action: Action) -> Look:
        """Return the name and the colour of an action."""
        phase = self.phases.get((action.stage, action.sequence, action.subsequence))
        if phase is not None and action.num_shards > 1:
            name, colours = PHASES[phase]
            if action.kind in colours:  # copies of a shard look like other copies
                return Look(name, colours[action.kind])
        if self._second is not None and action.kind in SECOND_COLOURS:
            by_stage = self._second == SECOND_STAGES
            turn = action.stage // self._schedule.num_ranks if by_stage else action.sequence or 0
            if turn % 2 == 1:
                return Look(self._second, SECOND_COLOURS[action.kind])
        return kind(action)

    def unit_label(self, action: Action) -> str:
        """Return the label of an action's unit; it names the sequence only if there are several."""
        schedule = self._schedule
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
    schedule, took = timeline.schedule, timeline.makespan_s
    stages = f", {schedule.num_stages} stages" if schedule.num_stages > schedule.num_ranks else ""
    counts = sorted({len(parts) for parts in schedule.lengths})
    parts = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    peak = max(track.peak_in_flight for track in timeline.ranks)
    whole = peak == int(peak)
    return (
        f"{schedule.name}: {counted(schedule.num_ranks, 'rank')}{stages}, "
        f"{counted(schedule.num_sequences, 'sequence')} of {parts} "
        f"subsequence{'' if parts == '1' else 's'} · {timeline.provenance} step "
        f"{f'{took:.4g}' if is_abstract else format_duration(took)} · "
        f"idle {timeline.bubble_fraction:.1%} · "
        f"at most {peak:.{0 if whole else 1}f} units in flight"
        f"{'' if whole else ', shards counted in part'}"
    )
