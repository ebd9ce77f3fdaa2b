"""Rules of completeness: every action once and on its rank, every message with both ends.

The actions that a step needs follow from its units, the ranks that share them, and the optional
actions that are there. What is needed and not there is missing, what is there and not needed is
misplaced, and nothing may be there twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    decode,
)
from sppo.schedule.messages import needed_messages
from sppo.schedule.schedule import Schedule

_LIMIT = 8
_Ints = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class _Actions:
    """Actions of all ranks, with their ranks and their positions in the programs of these."""

    program: EncodedProgram
    ranks: _Ints
    indices: _Ints

    @classmethod
    def of(cls, programs: Sequence[EncodedProgram]) -> _Actions:
        """Return all actions of the programs of all ranks."""
        ranks = [np.full(program.codes.size, rank) for rank, program in enumerate(programs)]
        indices = [np.arange(program.codes.size) for program in programs]
        return cls(EncodedProgram.joined(programs), np.concatenate(ranks), np.concatenate(indices))

    @classmethod
    def needed(cls, columns: Sequence[npt.NDArray[np.integer]]) -> _Actions:
        """Return actions with the columns opcode, slot, shard, number of shards and rank."""
        *program, ranks = (np.asarray(column, dtype=np.int32) for column in columns)
        return cls(EncodedProgram(*program), ranks.astype(np.int64), np.full(ranks.size, -1))

    def take(self, which: npt.NDArray[np.integer | np.bool_]) -> _Actions:
        """Return some of the actions."""
        return _Actions(self.program.take(which), self.ranks[which], self.indices[which])

    def with_codes(self, *codes: int) -> _Actions:
        """Return the actions of some kinds."""
        return self.take(np.isin(self.program.codes, codes))

    def violation(self, schedule: Schedule, place: int, rule: str, problem: str) -> Violation:
        """Return a violation by one of the actions; `problem` follows its name."""
        (action,) = decode(self.program.take(np.array([place])), lengths=schedule.lengths)
        index = int(self.indices[place])
        return Violation(
            rule, f"{action} {problem}", int(self.ranks[place]), None if index < 0 else index
        )


def coverage_problems(schedule: Schedule, *, programs: Sequence[EncodedProgram]) -> list[Violation]:
    """Return the violations of missing, duplicate and misplaced actions, messages left out."""
    actions = _Actions.of(programs)
    forwards = actions.with_codes(F)
    found = [*_missing_shards(schedule, forwards)]
    if found:
        return found
    holders = _holders(schedule)
    found = [
        *_compared(
            schedule,
            actions=forwards,
            needed=holders,
            rules=("coverage", "placement"),
            misplaced="is on a rank that does not hold its stage",
        ),
        *_group_problems(schedule),
    ]
    if found:
        return found
    for code, required in _required_slots(schedule, actions):
        of_slots = holders.take(required[holders.program.slots])
        found += _compared(
            schedule,
            actions=actions.with_codes(code),
            needed=_Actions(of_slots.program.changed(code), of_slots.ranks, of_slots.indices),
            rules=("coverage", "placement"),
            misplaced="is on a rank without the F of the same unit and shard",
        )
    moved, copied = actions.with_codes(KV, D2H_KV), _slots(actions, D2H_KV)
    cut = moved.program.num_shards > 1
    both = (moved.program.codes == KV) & np.isin(moved.program.slots, copied)
    for wrong, problem in (
        (cut, "moves K and V of a unit that is cut: they stay"),
        (both, "recomputes K and V that are copied, too"),
    ):
        found += [
            moved.violation(schedule, place, "copy order", problem)
            for place in np.flatnonzero(wrong)[:_LIMIT].tolist()
        ]
    return found


def _missing_shards(schedule: Schedule, forwards: _Actions) -> Iterator[Violation]:
    """Yield the violations of units of which not all shards are there."""
    slots, widths = forwards.program.slots, forwards.program.num_shards
    count = np.bincount(slots, weights=widths > 1)[slots] if slots.size else slots
    for place in np.flatnonzero((widths > 1) & (count != widths))[:_LIMIT].tolist():
        problem = f"is cut, and {int(count[place])} of {widths[place]} shards are there"
        yield forwards.violation(schedule, place, "coverage", problem)


def _holders(schedule: Schedule) -> _Actions:
    """Return an F of every unit on every stage, with one action per shard.

    A shard that no rank runs, because another is there twice, is needed on the rank of the stage.
    """
    slots = np.arange(schedule.num_stages * schedule.num_units)
    owners = slots // schedule.num_units % schedule.num_ranks
    groups = schedule.msp_groups
    rows = [
        (slot, shard, len(group.ranks), owners[slot] if rank < 0 else rank)
        for slot, group in groups.items()
        for shard, rank in enumerate(group.ranks)
    ]
    whole = np.setdiff1d(slots, [*groups])
    alone = [whole, np.zeros_like(whole), np.ones_like(whole), owners[whole]]
    shards = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    columns = np.concatenate([np.stack(alone), shards], axis=1)
    return _Actions.needed([np.full(columns.shape[1], F), *columns])


def _required_slots(schedule: Schedule, actions: _Actions) -> Iterator[tuple[int, _Flags]]:
    """Yield the kinds of actions besides F, and of which units on which stages each is needed.

    A copy needs its counterpart, and K and V of a sequence leave a stage for all units or none.
    """
    every = np.arange(schedule.num_stages * schedule.num_units)

    def there(*codes: int) -> _Flags:
        return np.isin(every, _slots(actions, *codes))

    def of_sequences(some: _Flags) -> _Flags:
        table = some.reshape(schedule.num_stages, schedule.num_units)
        any_unit = np.logical_or.reduceat(table, schedule.unit_offsets, axis=1)
        return any_unit.repeat([*map(len, schedule.lengths)], axis=1).ravel()

    yield B, np.full(every.shape, bool(there(B).any()))
    yield W, there(W)
    for code in (D2H, H2D):
        yield code, there(D2H, H2D)
    for code in (D2H_KV, H2D_KV):
        yield code, of_sequences(there(D2H_KV, H2D_KV))
    yield KV, of_sequences(there(KV))


def _slots(actions: _Actions, *codes: int) -> npt.NDArray[np.int32]:
    return actions.with_codes(*codes).program.slots


def _compared(
    schedule: Schedule,
    *,
    actions: _Actions,
    needed: _Actions,
    rules: tuple[str, str],
    misplaced: str,
) -> list[Violation]:
    """Return the violations of actions that are missing, duplicate or not needed where they are.

    Args:
        schedule: Schedule of the actions.
        actions: Actions that are there.
        needed: Actions that must be there.
        rules: Rule that missing and duplicate actions break, and that of misplaced ones.
        misplaced: What is wrong with an action that is not needed.
    """
    width = 1 + max(int(a.program.num_shards.max(initial=0)) for a in (actions, needed))

    def keys(some: _Actions) -> _Ints:
        codes, slots, shards, widths = (column.astype(np.int64) for column in some.program.columns)
        unit = codes * schedule.num_stages * schedule.num_units + slots
        return ((unit * width + widths) * width + shards) * schedule.num_ranks + some.ranks

    have, want = keys(actions), keys(needed)
    _, first, inverse = np.unique(have, return_index=True, return_inverse=True)
    again = first[inverse] != np.arange(have.size)
    return [
        some.violation(schedule, place, rule, problem)
        for some, wrong, rule, problem in (
            (needed, ~np.isin(want, have), rules[0], "is missing"),
            (actions, again, rules[0], "is there more than once"),
            (actions, ~np.isin(have, want), rules[1], misplaced),
        )
        for place in np.flatnonzero(wrong)[:_LIMIT].tolist()
    ]


def _group_problems(schedule: Schedule) -> Iterator[Violation]:
    """Yield the violations of units that ranks share: their ranks, and the tokens of the shards."""
    for cut in schedule.cuts:
        name = f"cut of {cut.stage}F{cut.sequence}.{cut.subsequence} into {list(cut.lengths)}"
        tokens = schedule.lengths[cut.sequence][cut.subsequence]
        if sum(cut.lengths) != tokens or min(cut.lengths, default=0) < 1:
            text = f"{name}: must be positive and add up to {tokens} tokens"
            yield Violation("coverage", text)
    for slot, group in schedule.msp_groups.items():
        whole = EncodedProgram.of_whole_units(F, [slot])
        (action,) = decode(whole, lengths=schedule.lengths)
        owner = schedule.placement.rank_of(action.stage)
        if len({*group.ranks}) < len(group.ranks):
            text = f"{action}: two shards of it are on one rank"
            yield Violation("placement", text, group.ranks[0])
        if owner not in group.ranks:
            text = f"{action}: no shard of it runs on rank {owner}, which has the weights"
            yield Violation("placement", text, group.ranks[0])
        if len(group.lengths) != len(group.ranks) or min(group.lengths) < 1:
            text = (
                f"{action} runs in {len(group.ranks)} shards, but its tokens are cut into "
                f"{list(group.lengths)}"
            )
            yield Violation("coverage", text, group.ranks[0])


def message_problems(schedule: Schedule, *, programs: Sequence[EncodedProgram]) -> list[Violation]:
    """Check that messages, if any, are exactly the needed ones, in the same order at both ends."""
    messages = _Actions.of(programs).with_codes(SEND_ACT, SEND_GRAD, RECV_ACT, RECV_GRAD)
    if not messages.ranks.size:
        return []
    found: list[Violation] = []
    for send, receive in ((SEND_ACT, RECV_ACT), (SEND_GRAD, RECV_GRAD)):
        needed = needed_messages(schedule, code=send)
        if send == SEND_GRAD and not schedule.is_training:
            needed = needed[:0]
        step = schedule.num_units if send == SEND_ACT else -schedule.num_units
        slots, shards, widths, senders, receivers = needed.T
        sends, receives = (messages.with_codes(code) for code in (send, receive))
        for actions, code, names, ranks in (
            (sends, send, slots, senders),
            (receives, receive, slots + step, receivers),
        ):
            found += _compared(
                schedule,
                actions=actions,
                needed=_Actions.needed([np.full_like(names, code), names, shards, widths, ranks]),
                rules=("message coverage", "message coverage"),
                misplaced="carries nothing that crosses ranks here",
            )
        if not found:
            found += _fifo_problems(schedule, sends, receives, needed=needed, step=step)
    return found


def _fifo_problems(
    schedule: Schedule, sends: _Actions, receives: _Actions, *, needed: _Ints, step: int
) -> list[Violation]:
    """Check that the k-th send and the k-th receive per (sender, receiver) are the same message.

    Args:
        schedule: Schedule of the messages.
        sends: SENDs of one wire.
        receives: RECVs of the wire.
        needed: Messages of the wire, as of :func:`needed_messages`.
        step: Difference of the slots of a RECV and its SEND.
    """
    slots, shards, _, senders, receivers = needed.T
    width, edges = int(shards.max(initial=0)) + 1, senders * schedule.num_ranks + receivers
    sent, received = (
        np.searchsorted(
            slots * width + shards, (own.program.slots - behind) * width + own.program.shards
        )
        for own, behind in ((sends, 0), (receives, step))
    )
    # Actions are in program order, rank by rank, so a stable sort keeps that order.
    in_order, order = (np.argsort(edges[rows], kind="stable") for rows in (sent, received))
    found = []
    for place in np.flatnonzero(sent[in_order] != received[order])[:1].tolist():
        first = sends.violation(schedule, int(in_order[place]), "message order", "")
        problem = f"stands where rank {first.rank} sends {first.text.strip()}"
        found.append(receives.violation(schedule, int(order[place]), "message order", problem))
    return found
