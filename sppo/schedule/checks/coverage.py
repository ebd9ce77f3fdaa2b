"""Rules of completeness: every action once and on its rank, every message with both ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sppo.schedule.checks.violations import Violation
from sppo.schedule.encoding import (
    D2H,
    D2H_KV,
    H2D,
    H2D_KV,
    KV,
    RECV_ACT,
    RECV_GRAD,
    SEND_ACT,
    SEND_GRAD,
    B,
    EncodedProgram,
    F,
    W,
)
from sppo.schedule.schedule import Schedule

_LIMIT = 8
_NAMES = {
    F: "F",
    B: "B",
    W: "W",
    KV: "KV",
    D2H: "D2H",
    H2D: "H2D",
    D2H_KV: "D2H_KV",
    H2D_KV: "H2D_KV",
}
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """All actions of one kind over all ranks, one entry per action."""

    ranks: _Ints
    indices: _Ints
    slots: _Ints
    shards: _Ints
    widths: _Ints


def coverage_problems(schedule: Schedule, *, programs: Sequence[EncodedProgram]) -> list[Violation]:
    """Return the violations of missing, duplicate and misplaced actions."""
    found: list[Violation] = []
    by_code = {code: _collect(programs, code=code) for code in _NAMES}
    trains = bool(by_code[B].slots.size)
    for code in _NAMES:
        required = code == F or (code == B and trains)
        found += _count_problems(schedule, code=code, actions=by_code[code], required=required)
        found += _placement_problems(schedule, actions=by_code[code])
    if found:
        return found
    for code in (B, W, KV, D2H, H2D, D2H_KV, H2D_KV):
        found += _mismatches(schedule, actions=by_code[code], forward=by_code[F])
    for out, back in ((D2H, H2D), (D2H_KV, H2D_KV)):
        found += _copy_problems(schedule, out=by_code[out], back=by_code[back])
    for code in (D2H_KV, KV):
        found += _kv_problems(schedule, actions=by_code[code])
    both = np.isin(by_code[KV].slots, by_code[D2H_KV].slots)
    for place in np.flatnonzero(both)[:_LIMIT].tolist():
        text = f"{_text(schedule, by_code[KV], place)} recomputes K and V that are copied, too"
        found.append(_violation("copy order", text, by_code[KV], place))
    return found + _cut_problems(schedule, programs=programs)


def _collect(programs: Sequence[EncodedProgram], *, code: int) -> _Found:
    which = [np.flatnonzero(program.codes == code) for program in programs]
    ranks = [np.full(found.shape, rank) for rank, found in enumerate(which)]

    def gather(name: str) -> _Ints:
        columns = [getattr(p, name)[w] for p, w in zip(programs, which, strict=True)]
        return np.concatenate(columns).astype(np.int64)

    return _Found(
        np.concatenate(ranks),
        np.concatenate(which),
        gather("slots"),
        gather("shards"),
        gather("num_shards"),
    )


def _count_problems(
    schedule: Schedule, *, code: int, actions: _Found, required: bool
) -> list[Violation]:
    """Check that each unit has one action per shard on each stage."""
    size = schedule.num_stages * schedule.num_units
    counts = np.bincount(actions.slots, minlength=size)
    found = []
    if required:
        for slot in np.flatnonzero(counts == 0)[:_LIMIT].tolist():
            text = f"{_name(schedule, code, slot)} is missing"
            rank = schedule.placement.rank_of(slot // schedule.num_units)
            found.append(Violation("coverage", text, rank))
    widths = np.zeros(size, dtype=np.int64)
    np.maximum.at(widths, actions.slots, actions.widths)
    most = int(widths.max(initial=1))
    keys = actions.slots * most + actions.shards
    _, first, times = np.unique(keys, return_index=True, return_counts=True)
    for place in first[times > 1][:_LIMIT].tolist():
        second = int(np.flatnonzero(keys == keys[place])[1])
        text = f"{_text(schedule, actions, second)} is there more than once"
        found.append(_violation("coverage", text, actions, second))
    if found:
        return found
    wrong = (counts > 0) & (counts != widths)
    for place in np.flatnonzero(wrong[actions.slots])[:_LIMIT].tolist():
        text = (
            f"{_text(schedule, actions, place)}: {counts[actions.slots[place]]} of "
            f"{widths[actions.slots[place]]} shards are there"
        )
        found.append(_violation("coverage", text, actions, place))
    return found


def _placement_problems(schedule: Schedule, *, actions: _Found) -> list[Violation]:
    """Check that whole units are on their stage's rank, and shards on ranks with the owner."""
    owners = np.array([schedule.placement.rank_of(s) for s in range(schedule.num_stages)])
    owner = owners[actions.slots // schedule.num_units]
    found = []
    wrong = (actions.widths == 1) & (actions.ranks != owner)
    for place in np.flatnonzero(wrong)[:_LIMIT].tolist():
        text = (
            f"{_text(schedule, actions, place)} is in the program of rank "
            f"{actions.ranks[place]}, its stage is on rank {owner[place]}"
        )
        found.append(_violation("placement", text, actions, place))
    cut = np.flatnonzero(actions.widths > 1)
    members: dict[int, list[int]] = {}
    for place in cut.tolist():
        members.setdefault(int(actions.slots[place]), []).append(place)
    for slot, places in members.items():
        ranks = [int(actions.ranks[place]) for place in places]
        if len(set(ranks)) < len(ranks):
            text = f"{_text(schedule, actions, places[-1])}: two shards of it are on one rank"
            found.append(_violation("placement", text, actions, places[-1]))
        elif owners[slot // schedule.num_units] not in ranks:
            text = (
                f"{_text(schedule, actions, places[0])}: no shard of it runs on rank "
                f"{owners[slot // schedule.num_units]}, which has the weights"
            )
            found.append(_violation("placement", text, actions, places[0]))
    return found[:_LIMIT]


def _mismatches(schedule: Schedule, *, actions: _Found, forward: _Found) -> list[Violation]:
    """Return a violation for each action that is not on the rank of its unit's F, cut alike."""
    width = int(max(forward.widths.max(initial=1), actions.widths.max(initial=1))) + 1
    ranks = schedule.num_ranks

    def keys(found: _Found) -> _Ints:
        return ((found.slots * width + found.widths) * width + found.shards) * ranks + found.ranks

    stray = ~np.isin(keys(actions), keys(forward))
    return [
        _violation(
            "placement",
            f"{_text(schedule, actions, place)} is on rank {actions.ranks[place]}, where no F of "
            "the same unit and shard is",
            actions,
            place,
        )
        for place in np.flatnonzero(stray)[:_LIMIT].tolist()
    ]


def _copy_problems(schedule: Schedule, *, out: _Found, back: _Found) -> list[Violation]:
    """Check that D2H and H2D come in pairs."""
    found = []
    for here, there in ((out, back), (back, out)):
        lonely = ~np.isin(here.slots, there.slots)
        for place in np.flatnonzero(lonely)[:_LIMIT].tolist():
            missing = "H2D" if here is out else "D2H"
            text = f"{_text(schedule, here, place)} has no {missing}"
            found.append(_violation("copy order", text, here, place))
    return found


def _kv_problems(schedule: Schedule, *, actions: _Found) -> list[Violation]:
    """Check that K and V leave for all units of a sequence on a stage or none, never for shards."""
    found = []
    for place in np.flatnonzero(actions.widths > 1)[:_LIMIT].tolist():
        text = f"{_text(schedule, actions, place)}: K and V of a unit that is cut stay"
        found.append(_violation("copy order", text, actions, place))
    stages, units = np.divmod(actions.slots, schedule.num_units)
    sequence_of = np.repeat(np.arange(schedule.num_sequences), [*map(len, schedule.lengths)])
    groups = stages * schedule.num_sequences + sequence_of[units]
    _, first, counts = np.unique(groups, return_index=True, return_counts=True)
    for place, count in zip(first.tolist(), counts.tolist(), strict=True):
        whole = len(schedule.lengths[int(sequence_of[units[place]])])
        if count < whole:
            text = (
                f"{_text(schedule, actions, place)}: K and V of {count} of {whole} units of the "
                "sequence do not stay"
            )
            found.append(_violation("copy order", text, actions, place))
    return found[:_LIMIT]


def _cut_problems(schedule: Schedule, *, programs: Sequence[EncodedProgram]) -> list[Violation]:
    """Check that the shard lengths of cut units fit the units."""
    found = []
    for cut in schedule.cuts:
        name = f"cut of {cut.stage}F{cut.sequence}.{cut.subsequence} into {list(cut.lengths)}"
        tokens = schedule.lengths[cut.sequence][cut.subsequence]
        if sum(cut.lengths) != tokens or min(cut.lengths, default=0) < 1:
            text = f"{name}: must be positive and add up to {tokens} tokens"
            found.append(Violation("coverage", text))
    for slot, group in schedule.msp_groups.items():
        if len(group.lengths) != len(group.ranks) or min(group.lengths) < 1:
            text = (
                f"{_name(schedule, F, slot)} runs in {len(group.ranks)} shards, but its tokens are "
                f"cut into {list(group.lengths)}"
            )
            found.append(Violation("coverage", text, group.ranks[0]))
    return found


def message_problems(schedule: Schedule, *, programs: Sequence[EncodedProgram]) -> list[Violation]:
    """Check that messages, if any, are exactly the needed ones, in the same order at both ends."""
    sends = [_collect(programs, code=code) for code in (SEND_ACT, SEND_GRAD)]
    receives = [_collect(programs, code=code) for code in (RECV_ACT, RECV_GRAD)]
    if not any(found.slots.size for found in (*sends, *receives)):
        return []
    found: list[Violation] = []
    for wire, (send, receive) in enumerate(zip(sends, receives, strict=True)):
        code = (SEND_ACT, SEND_GRAD)[wire]
        trains = any((program.codes == B).any() for program in programs)
        if code == SEND_GRAD and not trains:
            needed = np.zeros((0, 4), dtype=np.int64)
        else:
            needed = _needed_messages(schedule, code=code)
        step = schedule.num_units if code == SEND_ACT else -schedule.num_units
        found += _pairing_problems(schedule, actions=send, needed=needed[:, [0, 1, 2]], step=0)
        found += _pairing_problems(
            schedule, actions=receive, needed=needed[:, [0, 1, 3]], step=step
        )
        if not found:
            found += _fifo_problems(schedule, send=send, receive=receive, needed=needed, step=step)
    return found


def _needed_messages(schedule: Schedule, *, code: int) -> _Ints:
    """Return rows (producing slot, shard, sender, receiver) of one wire, ascending."""
    units, routes = schedule.num_units, schedule.msp_routes
    owners = np.array([schedule.placement.rank_of(s) for s in range(schedule.num_stages)])
    step = 1 if code == SEND_ACT else -1
    stages = np.arange(schedule.num_stages)
    stages = stages[(stages + step >= 0) & (stages + step < schedule.num_stages)]
    slots = (stages[:, None] * units + np.arange(units)).ravel()
    sender, receiver = owners[slots // units], owners[slots // units + step]
    cut = np.array([slot for c, slot in routes if c == code], dtype=np.int64)
    plain = (sender != receiver) & ~np.isin(slots, cut)
    rows = np.stack([slots, np.zeros_like(slots), sender, receiver], axis=1)[plain]
    extra = [
        (slot, shard, route.sender, route.receiver)
        for (c, slot), parts in routes.items()
        if c == code
        for shard, route in enumerate(parts)
        if route.sender != route.receiver
    ]
    if extra:
        rows = np.concatenate([rows, np.array(extra, dtype=np.int64)])
    ordered: _Ints = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    return ordered


def _pairing_problems(
    schedule: Schedule, *, actions: _Found, needed: _Ints, step: int
) -> list[Violation]:
    """Check for messages that are missing, duplicate, or on a rank that has no part in them."""
    width = int(max(needed[:, 1].max(initial=0), actions.shards.max(initial=0))) + 1
    ranks = schedule.num_ranks
    want = (needed[:, 0] * width + needed[:, 1]) * ranks + needed[:, 2]
    have = ((actions.slots - step) * width + actions.shards) * ranks + actions.ranks
    found = []
    for place in np.flatnonzero(~np.isin(have, want))[:_LIMIT].tolist():
        text = f"{_text(schedule, actions, place)} carries nothing that crosses ranks here"
        found.append(_violation("message coverage", text, actions, place))
    _, first, times = np.unique(have, return_index=True, return_counts=True)
    for place in first[times > 1][:_LIMIT].tolist():
        second = int(np.flatnonzero(have == have[place])[1])
        text = f"{_text(schedule, actions, second)} is there more than once"
        found.append(_violation("message coverage", text, actions, second))
    for row in np.flatnonzero(~np.isin(want, have))[:_LIMIT].tolist():
        slot, rank = int(needed[row, 0]), int(needed[row, 2])
        verb = "send" if step == 0 else "receive"
        text = f"rank {rank} does not {verb} {_result(schedule, slot)}"
        found.append(Violation("message coverage", text, rank))
    return found


def _fifo_problems(
    schedule: Schedule, *, send: _Found, receive: _Found, needed: _Ints, step: int
) -> list[Violation]:
    """Check that the k-th send and the k-th receive per (sender, receiver) are the same message."""
    width = int(needed[:, 1].max(initial=0)) + 1
    key = needed[:, 0] * width + needed[:, 1]
    if not key.size:
        return []
    row_of_send = np.searchsorted(key, send.slots * width + send.shards)
    row_of_receive = np.searchsorted(key, (receive.slots - step) * width + receive.shards)
    edge = needed[:, 2] * schedule.num_ranks + needed[:, 3]
    # Entries are collected rank by rank in program order, so a stable sort keeps that order.
    sends = row_of_send[np.argsort(edge[row_of_send], kind="stable")]
    order = np.argsort(edge[row_of_receive], kind="stable")
    receives = row_of_receive[order]
    found = []
    for place in np.flatnonzero(sends != receives)[:1].tolist():
        at = int(order[place])
        text = (
            f"{_text(schedule, receive, at)} stands where rank {needed[sends[place], 2]} sends "
            f"{_result(schedule, int(needed[sends[place], 0]))}"
        )
        found.append(_violation("message order", text, receive, at))
    return found


def _violation(rule: str, text: str, actions: _Found, place: int) -> Violation:
    return Violation(rule, text, int(actions.ranks[place]), int(actions.indices[place]))


def _text(schedule: Schedule, actions: _Found, place: int) -> str:
    return str(schedule.programs[int(actions.ranks[place])][int(actions.indices[place])])


def _name(schedule: Schedule, code: int, slot: int) -> str:
    """Return the program text of a whole unit's action, which need not exist."""
    return f"{slot // schedule.num_units}{_NAMES[code]}{_unit(schedule, slot)}"


def _result(schedule: Schedule, slot: int) -> str:
    """Return the name of a stage's result for a unit, forward or backward."""
    return f"what stage {slot // schedule.num_units} makes of unit {_unit(schedule, slot)}"


def _unit(schedule: Schedule, slot: int) -> str:
    offsets = schedule.unit_offsets
    unit = slot % schedule.num_units
    sequence = max(m for m, offset in enumerate(offsets) if offset <= unit)
    return f"{sequence}.{unit - offsets[sequence]}"
