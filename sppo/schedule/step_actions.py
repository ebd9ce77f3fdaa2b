"""Actions of all ranks of a step as columns, with look-ups by unit and by order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from sppo.schedule.actions import Lengths
from sppo.schedule.encoding import NUM_COMPUTE, REDUCE, B, EncodedProgram, F, decode
from sppo.schedule.graph import NOWHERE, Flags, Ints


class StepActions:
    """Actions of all ranks as columns, numbered rank after rank in program order.

    The last entry of each column stands for an action that never happens, number `never`.

    Args:
        programs: Program of each rank.
        lengths: Tokens of every subsequence of every sequence.
        num_stages: Number of stages of the pipeline.
    """

    def __init__(
        self, programs: Sequence[EncodedProgram], *, lengths: Lengths, num_stages: int
    ) -> None:
        counts = [program.codes.size for program in programs]
        self.never, self.num_ranks = sum(counts), len(counts)
        self.ranks = np.append(np.repeat(np.arange(len(counts)), counts), NOWHERE)
        self._program, self._lengths = EncodedProgram.joined(programs), lengths
        self.codes, self.slots, self.shards, self.widths = (
            np.append(column, end).astype(np.int64)
            for column, end in zip(self._program.columns, (-1, 0, 0, 1), strict=True)
        )
        num_units = sum(map(len, lengths))
        self.size = num_stages * num_units
        of_stage = self.codes >= REDUCE
        self.stages = np.where(of_stage, self.slots, self.slots // num_units)
        self.units = np.where(of_stage, 0, self.slots % num_units)
        starts = np.cumsum([0, *map(len, lengths)])[:-1]
        self.sequences = np.searchsorted(starts, self.units, side="right") - 1
        self.before = self.units - starts[self.sequences]
        """Number of subsequences before that of each action in its sequence."""
        self.behind = np.array([*map(len, lengths)])[self.sequences] - 1 - self.before
        self.most_shards = int(self.widths.max())
        self.compute = np.flatnonzero((self.codes >= 0) & (self.codes < NUM_COMPUTE))
        """Compute actions, in order."""
        self._places: dict[int, Ints] = {}

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
        """Return the place and the name of an action for an error."""
        rank, index = self.place(action)
        return f"rank {rank} at action {index + 1}, {self.name(action)}"

    def name(self, action: int) -> str:
        """Return an action as program text."""
        if action == self.never:
            return "an action that no program has"
        (named,) = decode(self._program.take(np.array([action])), lengths=self._lengths)
        return str(named)

    def first_shards(self) -> tuple[Ints, Ints]:
        """Return the shards of F and B, and the first shard of the unit of each."""
        cut = np.flatnonzero((self.widths > 1) & np.isin(self.codes, (F, B)))
        if not cut.size:
            return cut, cut
        first = [self.at(code, self.slots[cut]) for code in (F, B)]
        return cut, np.where(self.codes[cut] == F, *first)

    def last_before(self, actions: Ints, candidates: Ints, *, of: Ints) -> tuple[Ints, Flags]:
        """Return the last candidate before each action in the same group, and whether there is one.

        Args:
            actions: Actions.
            candidates: Actions to choose from, in ascending order.
            of: Group of each action: its rank or its stage.
        """
        return self._nearest(actions, candidates, of, of, "left", -1)

    def first_after(
        self, actions: Ints, candidates: Ints, *, of: Ints, among: Ints | None = None
    ) -> tuple[Ints, Flags]:
        """Return the first candidate behind each action, as :meth:`last_before` does.

        Args:
            actions: Actions.
            candidates: Actions to choose from.
            of: Group of each action.
            among: Group of each candidate, where it differs from `of`.
        """
        return self._nearest(actions, candidates, of, of if among is None else among, "right", 0)

    def _nearest(
        self,
        actions: Ints,
        candidates: Ints,
        of: Ints,
        among: Ints,
        side: Literal["left", "right"],
        step: int,
    ) -> tuple[Ints, Flags]:
        ordered = np.append(np.sort(among[candidates] * of.size + candidates), -1)
        wanted = of[actions] * of.size + actions
        found = ordered[np.searchsorted(ordered[:-1], wanted, side) + step]
        return found % of.size, found // of.size == of[actions]
