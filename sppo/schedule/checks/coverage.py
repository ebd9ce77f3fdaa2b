"""Rules of completeness: every action once and on its rank, every message with both ends.

The actions that a step needs follow from its units, the ranks that share them, and the optional
actions that are there. What is needed and not there is missing, what is there and not needed is
misplaced, and nothing may be there twice.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sppo.schedule.checks.violations import Violation
from sppo.schedule.encoding import (
    D2H,
    D2H_KV,
    H2D,
    H2D_KV,
    KV,
    RECV_ACT,
    RECV_GRAD,
    REDUCE,
    SEND_ACT,
    SEND_GRAD,
    B,
    EncodedProgram,
    F,
    W,
    decode,
)
from sppo.schedule.graph import Flags, Ints
from sppo.schedule.messages import needed_messages
from sppo.schedule.schedule import Schedule

_LIMIT = 8
_MESSAGES = (SEND_ACT, SEND_GRAD, RECV_ACT, RECV_GRAD)


def coverage_problems(schedule: Schedule) -> list[Violation]:
    """Return the violations of missing, duplicate and misplaced actions."""
    found = [*_group_problems(schedule)]
    return found or [*_compared(schedule, needed=_needed(schedule)), *_kv_problems(schedule)]


def _compared(schedule: Schedule, *, needed: Ints) -> Iterator[Violation]:
    """Yield the violations of actions that are missing, duplicate or not needed where they are.

    Args:
        schedule: Schedule of the actions.
        needed: Opcode, slot, shard, number of shards and rank of the actions that must be there,
            [5, actions].
    """
    actions = schedule.actions
    units = np.flatnonzero((actions.codes >= 0) & (actions.codes <= REDUCE))
    columns = (actions.codes, actions.slots, actions.shards, actions.widths, actions.ranks)
    there = np.stack([column[units] for column in columns])
    both = np.concatenate([there, needed], axis=1)
    limits = 1 + both.max(axis=1, initial=0)
    have, want = (np.ravel_multi_index(tuple(rows), tuple(limits)) for rows in (there, needed))
    for place in np.flatnonzero(~np.isin(want, have))[:_LIMIT].tolist():
        code, *columns_of_one, rank = needed[:, [place]].astype(np.int32)
        (action,) = decode(EncodedProgram(code, *columns_of_one), lengths=schedule.lengths)
        yield Violation(_rules(int(code[0]))[0], f"{action} is missing", int(rank[0]))
    _, first, inverse = np.unique(have, return_index=True, return_inverse=True)
    for place in np.flatnonzero(first[inverse] != np.arange(have.size))[:_LIMIT].tolist():
        text = f"{actions.name(int(units[place]))} is there more than once"
        yield Violation(_rules(int(there[0, place]))[0], text, *actions.place(int(units[place])))
    for place in np.flatnonzero(~np.isin(have, want))[:_LIMIT].tolist():
        _, rule, problem = _rules(int(there[0, place]))
        text = f"{actions.name(int(units[place]))} {problem}"
        yield Violation(rule, text, *actions.place(int(units[place])))


def _rules(code: int) -> tuple[str, str, str]:
    """Return the rule of completeness of a kind of action, that of its place, and its breach."""
    if code in _MESSAGES:
        return "message coverage", "message coverage", "carries nothing that crosses ranks here"
    if code == REDUCE:
        return "reduction", "reduction", "runs on a rank that does not hold its stage"
    misplaced = "is on a rank without the F of the same unit and shard"
    if code == F:
        misplaced = "is on a rank that does not hold its stage"
    return "coverage", "placement", misplaced


def _needed(schedule: Schedule) -> Ints:
    """Return the actions of a step that it needs, as rows of :func:`_compared`.

    A copy needs its counterpart, and K and V of a sequence leave a stage for all units or none.
    Copies of weights and gradients, of which a step may need several, are left out.
    """
    actions, holders = schedule.actions, _holders(schedule)

    def there(*codes: int) -> Flags:
        return np.isin(np.arange(actions.size), actions.slots[actions.of(*codes)])

    def of_sequences(some: Flags) -> Flags:
        table = some.reshape(schedule.num_stages, schedule.num_units)
        any_unit = np.logical_or.reduceat(table, schedule.unit_offsets, axis=1)
        return any_unit.repeat([*map(len, schedule.lengths)], axis=1).ravel()

    required = {
        F: np.ones(actions.size, dtype=bool),
        B: np.full(actions.size, schedule.is_training),
        W: there(W),
        KV: of_sequences(there(KV)),
        **dict.fromkeys((D2H, H2D), there(D2H, H2D)),
        **dict.fromkeys((D2H_KV, H2D_KV), of_sequences(there(D2H_KV, H2D_KV))),
    }
    parts = []
    for code, slots in required.items():
        own = holders[:, slots[holders[0]]]
        parts.append(np.vstack([np.full(own.shape[1], code), own]))
    if actions.of(*_MESSAGES).size:
        wires = ((SEND_ACT, RECV_ACT, 1), (SEND_GRAD, RECV_GRAD, -1))
        for send, receive, step in wires[: 1 + schedule.is_training]:
            messages = needed_messages(schedule, code=send)
            for code, slots, ranks in (
                (send, messages.slots, messages.senders),
                (receive, messages.slots + step * schedule.num_units, messages.receivers),
            ):
                codes = np.full_like(slots, code)
                parts.append(np.stack([codes, slots, messages.numbers, messages.counts, ranks]))
    reduced = np.unique(actions.slots[actions.of(REDUCE)])
    rank, zeros = reduced % schedule.num_ranks, np.zeros_like(reduced)
    parts.append(np.stack([zeros + REDUCE, reduced, zeros, zeros + 1, rank]))
    return np.concatenate(parts, axis=1)


def _holders(schedule: Schedule) -> Ints:
    """Return slot, shard, number of shards and rank of every unit or shard, [4, shards]."""
    slots = np.arange(schedule.actions.size)
    owners = slots // schedule.num_units % schedule.num_ranks
    groups = schedule.msp_groups
    rows = [
        (slot, shard, len(group.ranks), rank)
        for slot, group in groups.items()
        for shard, rank in enumerate(group.ranks)
    ]
    whole = np.setdiff1d(slots, [*groups])
    alone = np.stack([whole, np.zeros_like(whole), np.ones_like(whole), owners[whole]])
    return np.concatenate([alone, np.array(rows, dtype=np.int64).reshape(-1, 4).T], axis=1)


def _kv_problems(schedule: Schedule) -> Iterator[Violation]:
    """Yield the violations of K and V that move where they stay, or move twice."""
    actions = schedule.actions
    moved, copied = actions.of(KV, D2H_KV), actions.slots[actions.of(D2H_KV)]
    both = (actions.codes[moved] == KV) & np.isin(actions.slots[moved], copied)
    for wrong, problem in (
        (actions.widths[moved] > 1, "moves K and V of a unit that is cut: they stay"),
        (both, "recomputes K and V that are copied, too"),
    ):
        for action in moved[wrong][:_LIMIT].tolist():
            text = f"{actions.name(action)} {problem}"
            yield Violation("copy order", text, *actions.place(action))


def _group_problems(schedule: Schedule) -> Iterator[Violation]:
    """Yield the violations of units that ranks share: their shards, ranks and tokens."""
    for cut in schedule.cuts:
        name = f"cut of {cut.stage}F{cut.sequence}.{cut.subsequence} into {list(cut.lengths)}"
        tokens = schedule.lengths[cut.sequence][cut.subsequence]
        if sum(cut.lengths) != tokens or min(cut.lengths, default=0) < 1:
            text = f"{name}: must be positive and add up to {tokens} tokens"
            yield Violation("coverage", text)
    actions = schedule.actions
    forwards = actions.of(F)
    for slot, group in schedule.msp_groups.items():
        shards = forwards[actions.slots[forwards] == slot]
        first, width = int(shards[0]), len(group.ranks)
        name = actions.name(first).partition("[")[0]
        owner = schedule.placement.rank_of(slot // schedule.num_units)
        if sorted(actions.shards[shards].tolist()) != [*range(width)]:
            text = f"{name} is cut, and {shards.size} of {width} shards are there"
            yield Violation("coverage", text, *actions.place(first))
            continue
        if len({*group.ranks}) < width:
            text = f"{name}: two shards of it are on one rank"
            yield Violation("placement", text, group.ranks[0])
        if owner not in group.ranks:
            text = f"{name}: no shard of it runs on rank {owner}, which has the weights"
            yield Violation("placement", text, group.ranks[0])
        if len(group.lengths) != width or min(group.lengths) < 1:
            lengths = list(group.lengths)
            text = f"{name} runs in {width} shards, but its tokens are cut into {lengths}"
            yield Violation("coverage", text, group.ranks[0])
