"""Programs of all ranks of a pipeline for one step, as columns of integers.

A `Schedule` says which rank runs which actions in which order, and nothing about times: times are
the output of the simulator. A million actions are made, checked and simulated quickly, because all
passes work on its columns; `Schedule.programs` has the actions by name, for text and executor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from sppo.schedule.actions import (
    NUM_COMPUTE,
    OPCODES,
    WHOLE_STAGE_ACTIONS,
    Action,
    Cut,
    Lengths,
    Op,
    Placement,
    UnitKey,
    Wire,
)
from sppo.schedule.graph import NOWHERE, Flags, Floats, Ints
from sppo.schedule.msp_groups import MspGroup, Route, equal_shards, routes_between

_Number = TypeVar("_Number", bound=np.generic)
_NEVER = -1
"""Opcode of the action that never happens."""
_NAMES = {code: name for name, code in OPCODES.items()}


class MalformedActionError(ValueError):
    """Error of an action that names something the schedule does not have."""

    def __init__(self, problem: str, *, rank: int, index: int, action: Action) -> None:
        super().__init__(f"rank {rank}, action {index + 1}, {action}: {problem}")
        self.rank = rank
        self.index = index


def columns_of(
    ranks: npt.ArrayLike,
    codes: npt.ArrayLike,
    slots: npt.ArrayLike,
    shards: npt.ArrayLike = 0,
    widths: npt.ArrayLike = 1,
) -> Ints:
    """Return actions as columns of a `Schedule`; one value stands for all actions."""
    return np.stack(np.broadcast_arrays(ranks, codes, slots, shards, widths)).astype(np.int64)


class Schedule:
    """Pipeline program for all ranks.

    Actions are numbered rank after rank, in program order. Columns of actions have one entry more,
    for an action that never happens, number `never`. Every action has an opcode, a *slot* and a
    shard of the slot's unit. A slot is stage * num_units + unit, units numbered over all sequences,
    or the stage for an action of a whole stage; tables of units on stages are indexed by slot.

    Args:
        name: Name of the generator, or the name given in a program file.
        placement: Assignment of stages to ranks.
        lengths: Tokens of every subsequence of every sequence: lengths[sequence][subsequence].
            Message shapes follow from the lengths, so no shapes are exchanged at run time.
        columns: Rank, opcode, slot, shard and number of shards of each action, [5, actions].
        cuts: Shard lengths of the MSP units whose shards are not of equal length.

    Attributes:
        ranks: Rank of each action.
        codes: Opcode of each action (:class:`sppo.schedule.actions.Op`).
        slots: Slot of each action.
        shards: Shard of each action.
        widths: Number of shards of each action's unit, or of messages for SEND and RECV.
        tokens: Tokens of each unit.
        keys: Sequence and subsequence of each unit.
        num_units: Number of units of the step: subsequences of all sequences together.
        size: Number of slots.
    """

    def __init__(
        self,
        name: str,
        placement: Placement,
        lengths: Lengths,
        columns: Ints,
        cuts: tuple[Cut, ...] = (),
    ) -> None:
        self.name, self.placement, self.lengths, self.cuts = name, placement, lengths, cuts
        self.columns = columns
        self.never: int = columns.shape[1]
        self.num_ranks, self.num_stages = placement.num_ranks, placement.num_stages
        self.tokens = [tokens for parts in lengths for tokens in parts]
        self.keys = [(m, n) for m, parts in enumerate(lengths) for n in range(len(parts))]
        self.num_units = len(self.tokens)
        self.size = self.num_stages * self.num_units
        ends = np.array([[NOWHERE], [_NEVER], [0], [0], [1]])
        rows: list[Ints] = [*np.hstack([columns, ends])]
        self.ranks, self.codes, self.slots, self.shards, self.widths = rows
        self._places: dict[int, Ints] = {}

    @classmethod
    def of_actions(
        cls,
        name: str,
        placement: Placement,
        lengths: Lengths,
        programs: Sequence[Sequence[Action]],
        cuts: tuple[Cut, ...] = (),
    ) -> Schedule:
        """Return a schedule of given actions.

        Raises:
            ValueError: Another number of programs than ranks.
            MalformedActionError: An action that names something the schedule does not have.
        """
        if len(programs) != placement.num_ranks:
            raise ValueError(
                f"{len(programs)} programs for {placement.num_ranks} ranks: "
                "give one program per rank"
            )
        bare = cls(name, placement, lengths, np.zeros((5, 0), dtype=np.int64), cuts)
        rows = []
        for rank, program in enumerate(programs):
            for index, action in enumerate(program):
                problem = _problem(action, lengths=lengths, num_stages=placement.num_stages)
                if problem is not None:
                    raise MalformedActionError(problem, rank=rank, index=index, action=action)
                is_of_stage = action.sequence is None
                slot = action.stage if is_of_stage else bare.slot(action.stage, action.unit)
                code = OPCODES[action.kind, action.wire]
                rows.append((rank, code, slot, action.shard, action.num_shards))
        return bare.with_columns(np.array(rows, dtype=np.int64).reshape(-1, 5).T)

    def with_programs(self, programs: Sequence[Sequence[Action]]) -> Schedule:
        """Return the schedule with other actions.

        Raises:
            ValueError: Another number of programs than ranks.
            MalformedActionError: An action that names something the schedule does not have.
        """
        return Schedule.of_actions(self.name, self.placement, self.lengths, programs, self.cuts)

    def with_columns(self, columns: Ints) -> Schedule:
        """Return the schedule with other actions, given as columns."""
        return Schedule(self.name, self.placement, self.lengths, columns, self.cuts)

    def insert(self, *inserted: tuple[npt.NDArray[np.integer], Ints]) -> Schedule:
        """Return the schedule with more actions.

        Args:
            inserted: Places and columns: each action comes directly before the action that has its
                place now, or at the end of its rank if that action is of the next rank. Actions of
                the same place come in the order of the arguments.
        """
        places = [*(at for at, _ in inserted), np.arange(self.never)]
        columns = np.hstack([*(actions for _, actions in inserted), self.columns])
        return self.with_columns(columns[:, np.lexsort((np.concatenate(places), columns[0]))])

    def alike(self, actions: Ints, codes: npt.ArrayLike) -> Ints:
        """Return actions of the same units and shards with other opcodes, as columns."""
        ranks, _, slots, shards, widths = self.columns[:, actions]
        return columns_of(ranks, codes, slots, shards, widths)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        mine, others = (
            (one.name, one.placement, one.lengths, one.cuts, one.columns.tobytes())
            for one in (self, other)
        )
        return mine == others

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def programs(self) -> tuple[tuple[Action, ...], ...]:
        """Program of each rank, as actions."""
        return tuple(map(self.named, self.split_by_rank(self.columns)))

    def split_by_rank(self, columns: npt.NDArray[_Number]) -> list[npt.NDArray[_Number]]:
        """Return the parts of columns of all actions, without `never`, that belong to each rank."""
        ends = np.searchsorted(self.columns[0], np.arange(self.num_ranks), side="right")
        return np.split(columns, ends, axis=-1)[:-1]

    def named(self, columns: Ints) -> tuple[Action, ...]:
        """Return the actions of some columns by name."""
        _, codes, slots, shards, widths = columns.tolist()
        found = []
        for code, slot, shard, width in zip(codes, slots, shards, widths, strict=True):
            kind, wire = _NAMES[code]
            if code >= Op.REDUCE:
                found.append(Action(kind, slot, wire=wire))
                continue
            stage, unit = divmod(slot, self.num_units)
            sequence, subsequence = self.keys[unit]
            found.append(Action(kind, stage, sequence, subsequence, wire, shard, width))
        return tuple(found)

    @property
    def num_sequences(self) -> int:
        """Number of sequences of the step (M)."""
        return len(self.lengths)

    @property
    def num_actions(self) -> int:
        """Number of actions of all ranks together."""
        return self.never

    @cached_property
    def forward_only_stages(self) -> int:
        """Number of first stages without a backward; all stages of an evaluation."""
        backward = self.slots[self.codes == Op.B]
        return int(backward.min(initial=self.size)) // self.num_units

    @property
    def is_training(self) -> bool:
        """True if the programs hold a backward pass (False for evaluation)."""
        return self.forward_only_stages < self.num_stages

    @cached_property
    def unit_offsets(self) -> tuple[int, ...]:
        """Index of each sequence's first unit, units numbered over all sequences."""
        return (0, *accumulate(map(len, self.lengths[:-1])))

    @cached_property
    def stages(self) -> Ints:
        """Stage of each action."""
        return np.where(self.codes >= Op.REDUCE, self.slots, self.slots // self.num_units)

    @cached_property
    def units(self) -> Ints:
        """Unit of each action; 0 for an action of a whole stage."""
        return np.where(self.codes >= Op.REDUCE, 0, self.slots % self.num_units)

    @cached_property
    def sequences(self) -> Ints:
        """Sequence of each action."""
        return np.searchsorted(self.unit_offsets, self.units, side="right") - 1

    @cached_property
    def before(self) -> Ints:
        """Number of subsequences before that of each action in its sequence."""
        offsets: Ints = np.array(self.unit_offsets)
        return self.units - offsets[self.sequences]

    @cached_property
    def behind(self) -> Ints:
        """Number of subsequences behind that of each action in its sequence."""
        counts: Ints = np.array([*map(len, self.lengths)])
        return counts[self.sequences] - 1 - self.before

    @cached_property
    def compute(self) -> Ints:
        """Compute actions, in order."""
        return np.flatnonzero((self.codes >= 0) & (self.codes < NUM_COMPUTE))

    @cached_property
    def most_shards(self) -> int:
        """Largest number of shards of a unit, or of messages of a tensor."""
        return int(self.widths.max())

    def of(self, *codes: int) -> Ints:
        """Return the actions of some kinds, in order."""
        return np.flatnonzero(np.logical_or.reduce([self.codes == code for code in codes]))

    def at(self, code: int, slots: Ints, shards: Ints | int = 0) -> Ints:
        """Return the action of one kind for each unit and shard; `never` where there is none."""
        if code not in self._places:
            found, places = self.of(code), np.full(self.size * self.most_shards, self.never)
            places[self.slots[found] * self.most_shards + self.shards[found]] = found
            self._places[code] = places
        actions: Ints = self._places[code][slots * self.most_shards + shards]
        return actions

    def place(self, action: int) -> tuple[int, int]:
        """Return the rank of an action and its position in the program of the rank, from 0."""
        rank = int(self.ranks[action])
        return rank, action - int(np.searchsorted(self.ranks[:-1], rank))

    def text(self, action: int) -> str:
        """Return an action as program text."""
        return str(self.named(self.columns[:, [action]])[0])

    def text_with_place(self, action: int) -> str:
        """Return the place and the text of an action for an error."""
        rank, index = self.place(action)
        return f"rank {rank} at action {index + 1}, {self.text(action)}"

    def first_shards(self) -> tuple[Ints, Ints]:
        """Return the shards of F and B, and the first shard of the unit of each."""
        cut = np.flatnonzero((self.widths > 1) & np.isin(self.codes, (Op.F, Op.B)))
        if not cut.size:
            return cut, cut
        first = [self.at(code, self.slots[cut]) for code in (Op.F, Op.B)]
        return cut, np.where(self.codes[cut] == Op.F, *first)

    def nearest(
        self,
        actions: Ints,
        candidates: Ints,
        *,
        of: Ints,
        among: Ints | None = None,
        behind: bool = False,
    ) -> tuple[Ints, Flags]:
        """Return the nearest candidate of the same group before each action, or behind it.

        Args:
            actions: Actions.
            candidates: Actions to choose from.
            of: Group of each action: its rank or its stage, say.
            among: Group of each candidate, where it differs from `of`.
            behind: Whether to look behind the actions instead of before them.

        Returns:
            The candidates, and whether there is one.
        """
        groups = of if among is None else among
        ordered = np.append(np.sort(groups[candidates] * of.size + candidates), -1)
        wanted = of[actions] * of.size + actions
        place = np.searchsorted(ordered[:-1], wanted, "right" if behind else "left")
        found = ordered[place if behind else place - 1]
        return found % of.size, found // of.size == of[actions]

    def slot(self, stage: int, unit: UnitKey) -> int:
        """Return the index of a unit on a stage in tables of all stages and units."""
        sequence, subsequence = unit
        return stage * self.num_units + self.unit_offsets[sequence] + subsequence

    @cached_property
    def msp_groups(self) -> Mapping[int, MspGroup]:
        """Ranks that share a unit, by slot; empty for every schedule without MSP."""
        found = np.flatnonzero((self.widths > 1) & (self.codes == Op.F))
        ranks_of: dict[int, dict[int, int]] = {}
        widths: dict[int, int] = {}
        for rank, _, slot, shard, width in self.columns[:, found].T.tolist():
            ranks_of.setdefault(slot, {})[shard] = rank
            widths[slot] = width
        lengths = {
            slot: equal_shards(self.tokens[slot % self.num_units], num_shards=width)
            for slot, width in widths.items()
        }
        for cut in self.cuts:
            lengths[self.slot(cut.stage, (cut.sequence, cut.subsequence))] = cut.lengths
        return {
            slot: MspGroup(tuple(ranks.get(k, -1) for k in range(widths[slot])), lengths[slot])
            for slot, ranks in sorted(ranks_of.items())
        }

    @cached_property
    def shares(self) -> Floats:
        """Fraction of its unit's tokens that each action runs; 1 for all but compute."""
        shares = np.ones(self.codes.shape)
        for action in self.compute[self.widths[self.compute] > 1].tolist():
            lengths = self.msp_groups[int(self.slots[action])].lengths
            shares[action] = lengths[int(self.shards[action])] / sum(lengths)
        return shares

    def routes(self, wire: Wire, *, producer: int, unit: UnitKey) -> tuple[Route, ...]:
        """Return the routes of a stage's result for a unit; () if no stage takes it.

        No stage without a backward takes a gradient.

        A unit that is whole on both stages has one route, even if it stays on its rank.

        Args:
            wire: "act" to the next stage, "grad" to the stage before.
            producer: Stage that makes the result.
            unit: Unit of the result.
        """
        consumer = producer + (1 if wire == "act" else -1)
        first = 0 if wire == "act" else self.forward_only_stages
        if not (0 <= producer < self.num_stages and first <= consumer < self.num_stages):
            return ()
        return self._routes(self.slot(producer, unit), self.slot(consumer, unit))

    def _routes(self, slot: int, consumer: int) -> tuple[Route, ...]:
        """Return the routes of a unit between adjacent stages; gradients take those of F back."""
        ahead = routes_between(*map(self._holders, sorted((slot, consumer))))
        return ahead if slot < consumer else tuple(route.reversed() for route in ahead)

    def _holders(self, slot: int) -> Sequence[tuple[int, int]]:
        """Return rank and tokens of every shard of a unit on a stage."""
        if slot in self.msp_groups:
            return self.msp_groups[slot].holders
        stage, unit = divmod(slot, self.num_units)
        return [(self.placement.rank_of(stage), self.tokens[unit])]

    @cached_property
    def messages(self) -> Mapping[int, tuple[Ints, Ints, Ints, Floats]]:
        """Messages that a step needs, by opcode of SEND, whether the programs hold them or not.

        For each wire: SENDs and RECVs as columns, [5, messages]; the shard of the unit that makes
        each tensor; and the fraction of the unit's tokens that each message carries.
        """
        units, backward = self.num_units, self.forward_only_stages * self.num_units
        ahead, back = np.arange(self.size - units), np.arange(backward + units, self.size)
        return {
            Op.SEND_ACT: self._messages(Op.SEND_ACT, Op.RECV_ACT, ahead, step=units),
            Op.SEND_GRAD: self._messages(Op.SEND_GRAD, Op.RECV_GRAD, back, step=-units),
        }

    def _messages(
        self, send: int, receive: int, slots: Ints, *, step: int
    ) -> tuple[Ints, Ints, Ints, Floats]:
        """Return the messages of the results of `slots` for the stages `step` slots further."""
        owners = np.arange(self.size) // self.num_units % self.num_ranks
        at_groups = {slot for group in self.msp_groups for slot in (group, group - step)}
        cut = sorted(at_groups & {*slots.tolist()}) if at_groups else []
        crosses = owners[slots] != owners[slots + step]
        whole = np.setdiff1d(slots[crosses], cut)
        of_whole = np.broadcast_arrays(whole, 0, 1, owners[whole], owners[whole + step], 0, 1.0)
        of_cut = []
        for slot in cut:
            routes = self._routes(slot, slot + step)
            ranks = self.msp_groups[slot].ranks if slot in self.msp_groups else ()
            for number, route in enumerate(routes):
                if route.sender != route.receiver:
                    shard = ranks.index(route.sender) if ranks else 0
                    ends = route.sender, route.receiver
                    of_cut.append((slot, number, len(routes), *ends, shard, route.share))
        rows = np.hstack([np.stack(of_whole), np.array(of_cut).reshape(-1, 7).T])
        made, numbers, counts, senders, receivers, shards = rows[:-1].astype(np.int64)
        return (
            columns_of(senders, send, made, numbers, counts),
            columns_of(receivers, receive, made + step, numbers, counts),
            shards,
            rows[-1],
        )

    @cached_property
    def peak_in_flight(self) -> list[float]:
        """Largest number of units that each rank holds between their F and their last B or W.

        A shard counts as its share of the unit. On a stage without a backward, which keeps nothing,
        a unit is in flight only while it runs.
        """
        shares = np.where(self.codes == Op.F, self.shares, 0.0)
        changes = np.where(self.stages < self.forward_only_stages, 0.0, shares)
        running = shares - changes
        done = self.of(Op.B, Op.W)
        # The last of B and W of a slot on a rank releases it: the first one of the reversed order.
        _, last = np.unique((self.ranks * self.size + self.slots)[done][::-1], return_index=True)
        release = done[::-1][last]
        changes[release] -= self.shares[release]
        both = np.stack([changes, running])[:, :-1]
        held = [np.cumsum(own) + beside for own, beside in self.split_by_rank(both)]
        # Shares of a unit add up to 1 only up to rounding.
        return [round(float(own.max(initial=0.0)), 9) for own in held]

    def digest(self) -> str:
        """Return the SHA-256 (hexadecimal) of the whole schedule; equal only for equal schedules.

        Ranks compare digests at start-up, so that no two ranks run different programs.
        """
        state = hashlib.sha256()
        ranks, virtual = self.placement.num_ranks, self.placement.num_virtual
        # Plans that exist hold digests with these words.
        placement = f"Placement(num_ranks={ranks}, num_virtual={virtual}, style='loop')"
        header = f"({self.name!r}, {placement}, {self.lengths!r}, {self.cuts!r})"
        state.update(header.encode())
        for program in self.programs:
            state.update(b"\n")
            state.update(" ".join(map(str, program)).encode())
        return state.hexdigest()


def _problem(action: Action, *, lengths: Lengths, num_stages: int) -> str | None:
    """Return what is wrong with `action` on its own, or None."""
    if not 0 <= action.stage < num_stages:
        return f"stage {action.stage} does not exist: there are {num_stages}"
    if (action.kind, action.wire) not in OPCODES:
        return (
            "SEND and RECV carry 'act' or 'grad', D2H may carry 'kv' or 'gradients', H2D 'kv', "
            "'weights' or 'gradients', others nothing"
        )
    if (action.kind, action.wire) in WHOLE_STAGE_ACTIONS:
        whole = action.sequence is None and action.subsequence is None and action.num_shards == 1
        name = str(action._replace(sequence=None)).lstrip("0123456789")
        return None if whole else f"{name} names only a stage"
    if action.sequence is None or not 0 <= action.sequence < len(lengths):
        return f"sequence {action.sequence} does not exist: there are {len(lengths)}"
    parts = len(lengths[action.sequence])
    if action.subsequence is None or not 0 <= action.subsequence < parts:
        return f"sequence {action.sequence} has {parts} subsequences, counted from 0"
    if not 0 <= action.shard < action.num_shards:
        return f"piece {action.shard} of {action.num_shards} does not exist, counted from 0"
    return None
