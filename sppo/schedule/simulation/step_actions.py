"""Actions of all ranks of a step as columns, with look-ups by unit and by order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from sppo.schedule.encoding import NUM_COMPUTE, REDUCE, B, EncodedProgram, F
from sppo.schedule.graph import NOWHERE, Flags, Ints
from sppo.schedule.schedule import Schedule


class StepActions:
    """Actions of all ranks as columns, numbered rank after rank in program order.

    The last entry of each column stands for an action that never happens, number `never`.

    Args:
        schedule: Schedule of the step.
        programs: Encoded programs of its ranks.
    """

    def __init__(self, schedule: Schedule, programs: Sequence[EncodedProgram]) -> None:
        counts = [program.codes.size for program in programs]
        self.never = sum(counts)
        self.ranks = np.append(np.repeat(np.arange(len(counts)), counts), NOWHERE)
        self.codes, self.slots, self.shards, self.widths = (
            np.append(np.concatenate([getattr(one, name) for one in programs]), end).astype(
                np.int64
            )
            for name, end in (("codes", -1), ("slots", 0), ("shards", 0), ("num_shards", 1))
        )
        self._schedule = schedule
        self.size = schedule.num_stages * schedule.num_units
        of_stage = self.codes >= REDUCE
        self.stages = np.where(of_stage, self.slots, self.slots // schedule.num_units)
        self.units = np.where(of_stage, 0, self.slots % schedule.num_units)
        self.most_shards = int(self.widths.max())
        self.compute = np.flatnonzero((self.codes >= 0) & (self.codes < NUM_COMPUTE))
        """Compute actions, in order."""
        self._places: dict[int, Ints] = {}

    @property
    def is_cut(self) -> bool:
        """True if a unit runs in shards, or is sent in several messages."""
        return self.most_shards > 1

    def of(self, *codes: int) -> Ints:
        """Return the actions of some kinds, in order."""
        return np.flatnonzero(np.isin(self.codes, codes) if codes[1:] else self.codes == codes[0])

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
        rank, index = self.place(action)
        return str(self._schedule.programs[rank][index])

    def first_shards(self) -> tuple[Ints, Ints]:
        """Return the shards of F and B, and the first shard of the unit of each."""
        cut = np.flatnonzero((self.widths > 1) & np.isin(self.codes, (F, B)))
        if not cut.size:
            return cut, cut
        first = [self.at(code, self.slots[cut]) for code in (F, B)]
        return cut, np.where(self.codes[cut] == F, *first)

    def before(self, actions: Ints, candidates: Ints, *, of: Ints) -> tuple[Ints, Flags]:
        """Return the last candidate before each action in the same group, and whether there is one.

        Args:
            actions: Actions.
            candidates: Actions to choose from, in ascending order.
            of: Group of each action: its rank or its stage.
        """
        return self._nearest(actions, candidates, of, "left", -1)

    def after(self, actions: Ints, candidates: Ints, *, of: Ints) -> tuple[Ints, Flags]:
        """Return the first candidate behind each action, as :meth:`before` does."""
        return self._nearest(actions, candidates, of, "right", 0)

    def _nearest(
        self, actions: Ints, candidates: Ints, of: Ints, side: Literal["left", "right"], step: int
    ) -> tuple[Ints, Flags]:
        keys = of * of.size + np.arange(of.size)
        ordered = np.append(np.sort(keys[candidates]), -1)
        places = np.searchsorted(ordered[:-1], keys[actions], side) + step
        found = ordered[places] % of.size
        return found, (ordered[places] >= 0) & (of[found] == of[actions])
