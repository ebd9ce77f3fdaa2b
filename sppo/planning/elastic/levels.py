"""Levels: placement of saved tensors per unit, so that every rank has room at every moment.

Every unit of a step has a *level*: whether backward recomputes the attention class, the linear
class, both or neither, and whether tensors are offloaded as far as the copies hide behind compute.
Other ranks wait for recomputation on one rank, so the units of one diagonal of the pipeline have
the same level and add the time that the slowest of them adds. All diagonals begin with the level
that adds least time. While a rank lacks memory, a diagonal gets another level: of those held at the
fullest moment of all ranks, the one that adds least time for each byte that it frees then.
Afterwards, units of ranks with free memory recompute less, which slows down no rank.

For steps of 32 and 128 samples on 2 to 8 ranks, steps took 0.6 % less to 0.6 % more time than with
levels from the linear relaxation of this choice, rounded and improved by exchanges. InfiniPipe's
stage-aware chunk-level adaptive checkpointing makes the choice by integer program; its level is the
number of layers that are recomputed whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sppo.activations.placement import ROW_ALIGNMENT, ActivationPlacement, Counts
from sppo.activations.policy import decide
from sppo.activations.policy_inputs import PolicyInputs
from sppo.activations.tensor_classes import ATTENTION, LINEAR
from sppo.cost.candidate import Candidate, of_ranks
from sppo.cost.memory.messages import sent_bytes
from sppo.cost.memory.unit_working_sets import computing_bytes
from sppo.cost.memory.walk import Walk, kv_held, walk_of
from sppo.cost.stage_cost import (
    StageSeconds,
    copy_bytes_per_s,
    placed_bytes,
    stage_costs,
    stage_seconds,
    weight_operand_bytes,
)
from sppo.planning.elastic.pacing import can_be_paced, pace_forwards
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.planning.search.policy_inputs import policy_inputs
from sppo.schedule.costs import Table

Levels = npt.NDArray[np.intp]
"""Level of each diagonal or unit, by index."""

_ATTEMPTS = 3
"""Most times that levels are chosen, each time with less room if the choice takes too much."""


@dataclass(frozen=True, slots=True)
class Level:
    """Placement of one unit's saved tensors: recomputed shares, and whether to offload.

    Attributes:
        attention: Share of the rows of the attention class that backward recomputes.
        linear: Share of the rows of the linear class that backward recomputes.
        offloads: Whether rows whose copies hide behind compute are offloaded, before others are
            recomputed.
    """

    attention: float = 0.0
    linear: float = 0.0
    offloads: bool = False


LEVELS = (Level(), Level(linear=1.0), Level(attention=1.0), Level(1.0, 1.0))
"""Levels of a machine without a tier to offload to; the last needs least memory."""
OFFLOADING_LEVELS = (*LEVELS, *(replace(level, offloads=True) for level in LEVELS))
"""Levels of a machine with a tier to offload to; the last needs least memory."""


def fastest_levels(candidate: Candidate) -> EvaluatedCandidate | None:
    """Return the candidate with the levels that simulate fastest; None if none fits.

    Offloading needs memory for slots of copies, so levels without offloading are tried, too, unless
    unpaced levels with offloading recompute nothing. Paced ranks that begin fewer forwards idle
    more, and have room to recompute less: the pacings of all levels are tried.

    Args:
        candidate: Candidate with packed sequences; its activation policy is ignored.
    """
    retaining = evaluate_candidate(replace(candidate, policy="retain"))
    if retaining.shortfall is None:
        return retaining
    has_tier = copy_bytes_per_s(candidate)[0] > 0 and candidate.kv != "recomputed"
    found: list[EvaluatedCandidate] = []
    for levels in (OFFLOADING_LEVELS, LEVELS) if has_tier else (LEVELS,):
        for choice in level_choices(candidate, levels=levels):
            placed = choice.least_added()
            if placed is not None:
                found.append(placed)
        if any(map(_runs_freely, found)):
            break
    return min(found, key=lambda one: one.step_s, default=None)


def _runs_freely(placed: EvaluatedCandidate) -> bool:
    """Return whether a candidate recomputes nothing, and its ranks are not paced."""
    paced = placed.candidate.forwards_before_backward
    return not (placed.placement.recomputed.any() or paced)


def level_choices(candidate: Candidate, *, levels: Sequence[Level]) -> Iterator[LevelChoice]:
    """Yield the choice among levels; if not even the last level fits, under each pacing.

    The pacing of the last level comes first.
    """
    choice = level_choice(candidate, levels=levels)
    if choice.fits or not can_be_paced(candidate):
        yield choice
        return
    paced = map(choice.paced, reversed(range(len(levels))))
    yield from {own.candidate.forwards_before_backward: own for own in paced}.values()


def _excess_bytes(evaluated: EvaluatedCandidate) -> Table:
    """Return the bytes that each rank lacks, [ranks]; negative for ranks with free memory."""
    totals = [float(rank.device.total_bytes) for rank in evaluated.memory]
    excess: Table = np.array(totals) - evaluated.candidate.budget_bytes
    return excess


@dataclass(frozen=True, eq=False)
class LevelChoice:
    """Bytes and seconds of a candidate at every level. Tables are [levels, stages, subsequences].

    Backwards lie on *diagonals*: the k-th backward of rank r of p is on diagonal k + p - 1 - r. In
    a steady pipeline, the backwards of one diagonal run at the same time, each rank one unit behind
    the rank after it (InfiniPipe's C[f2b(k) + d_p - p]).

    Attributes:
        candidate: Candidate whose units get levels.
        placements: Placement with all units at the level, per level.
        held_bytes: Bytes that a unit retains from its forward to the end of its backward.
        forward_bytes: Bytes that the forward of a unit needs while it runs.
        backward_bytes: Bytes that the backward of a unit needs while it runs.
        added: Seconds that the level adds.
    """

    candidate: Candidate
    placements: tuple[ActivationPlacement, ...]
    held_bytes: Table
    forward_bytes: Table
    backward_bytes: Table
    added: Table

    @cached_property
    def _walk(self) -> Walk:
        """Walk along the programs of all ranks."""
        return walk_of(self.candidate)

    @cached_property
    def _places(self) -> tuple[Levels, Levels, Levels]:
        """Places of each unit's F and B among its rank's actions, and its diagonal."""
        walk, ranks = self._walk, len(self._walk.stages)
        ends = np.cumsum(walk.is_backward, axis=1) + np.arange(ranks)[::-1, None] - 1
        actions = np.broadcast_to(np.arange(ends.shape[1]), ends.shape)
        forwards, backwards, diagonals = np.zeros((3, *self.added.shape[1:]), dtype=np.intp)
        for table, which, values in (
            (forwards, walk.is_forward, actions),
            (backwards, walk.is_backward, actions),
            (diagonals, walk.is_backward, ends),
        ):
            table[walk.stages[which], walk.units[which]] = values[which]
        return forwards, backwards, diagonals

    @property
    def diagonals(self) -> Levels:
        """Diagonal of each unit's backward, [stages, subsequences]."""
        return self._places[2]

    @cached_property
    def fixed_bytes(self) -> Table:
        """Bytes during each action that do not depend on levels, [ranks, actions].

        K and V, their gradients, and operands of deferred weight gradients.
        """
        walk, (kv, gradients) = self._walk, kv_held(self.candidate)
        operands = walk.of_actions(weight_operand_bytes(self.candidate))
        fixed: Table = np.cumsum(operands * walk.defers, axis=1)
        fixed += kv + gradients - operands * np.maximum(0, walk.defers)
        return fixed

    def taken(self, levels: Levels) -> Table:
        """Return the bytes during each forward and backward, [ranks, actions]; 0 during others.

        Args:
            levels: Level of each unit, [stages, subsequences].
        """
        walk = self._walk
        saved, forward, backward = (
            walk.of_actions(np.take_along_axis(table, levels[None], axis=0)[0])
            for table in (self.held_bytes, self.forward_bytes, self.backward_bytes)
        )
        held: Table = np.cumsum(saved * walk.begins, axis=1) + saved * walk.is_backward
        held += np.where(walk.is_forward, forward, backward) + self.fixed_bytes
        taken: Table = held * (walk.is_forward | walk.is_backward)
        return taken

    @cached_property
    def least_memory(self) -> EvaluatedCandidate:
        """Candidate with the last level of all units."""
        return self.evaluated(self._last_level)

    @property
    def fits(self) -> bool:
        """True if the candidate fits with the last level of all units."""
        return self.least_memory.shortfall is None

    @cached_property
    def room(self) -> Table:
        """Bytes on each rank for units and their K and V, [ranks]."""
        room: Table = self.taken(self._last_level).max(axis=1)
        return room - _excess_bytes(self.least_memory)

    @property
    def _last_level(self) -> Levels:
        return np.full(self.held_bytes.shape[1:], len(self.placements) - 1)

    def least_added(self) -> EvaluatedCandidate | None:
        """Return the candidate with levels that add little; None if not even the last level fits.

        If no choice is found that fits, all units have the last level.
        """
        if not self.fits:
            return None
        room = self.room
        for _ in range(_ATTEMPTS):
            chosen = self.levels(room)
            if chosen is None:
                break
            found = self.evaluated(chosen)
            if found.shortfall is None:
                return found
            room = np.minimum(room, self.taken(chosen).max(axis=1) - _excess_bytes(found))
        return self.least_memory

    def levels(self, room: Table) -> Levels | None:
        """Return the level of each unit, [stages, subsequences]; None if none are found that fit.

        Args:
            room: Bytes on each rank for units and their K and V, [ranks].
        """
        of_diagonals = self.of_diagonals(room)
        if of_diagonals is None:
            return None
        levels: Levels = of_diagonals[self.diagonals]
        for rank, free in enumerate(room[:, None] - self.taken(levels)):
            self._lower(levels, rank, free)
        return levels

    def of_diagonals(self, room: Table) -> Levels | None:
        """Return a level for each diagonal; None if none are found that fit.

        Args:
            room: Bytes on each rank for units and their K and V, [ranks].
        """
        levels: Levels = self.added_by_diagonals.argmin(axis=1)
        left = room[:, None] - self.taken(levels[self.diagonals])
        while left.min() < 0:
            rank, action = divmod(int(left.argmin()), left.shape[1])
            change = self._cheapest(levels, rank, action)
            if change is None:
                return None
            diagonal, level = change
            for stage, unit in np.argwhere(self.diagonals == diagonal).tolist():
                span, more = self._more(stage, unit, level, now=int(levels[diagonal]))
                left[stage % len(left), span] -= more
            levels[diagonal] = level
        return levels

    @cached_property
    def added_by_diagonals(self) -> Table:
        """Seconds that each level of each diagonal adds, [diagonals, levels]."""
        added = np.zeros((int(self.diagonals.max()) + 1, len(self.placements)))
        np.maximum.at(added, self.diagonals, np.moveaxis(self.added, 0, -1))
        return added

    def _of_rank(self, rank: int) -> tuple[Levels, Levels]:
        """Return stages and subsequences of the units of a rank, in the order of its backwards."""
        own = self._walk.is_backward[rank]
        return self._walk.stages[rank, own], self._walk.units[rank, own]

    def _cheapest(self, levels: Levels, rank: int, action: int) -> tuple[int, int] | None:
        """Return the diagonal and its level that free memory of a rank at a moment most cheaply.

        The level adds more time than that of the diagonal now, so that no level comes back.

        Args:
            levels: Level of each diagonal.
            rank: Pipeline rank.
            action: Place of the action that runs at that moment.
        """
        own = self._of_rank(rank)
        forwards, backwards, diagonals = (places[own] for places in self._places)
        held, forward, backward = (
            table[:, *own].T for table in (self.held_bytes, self.forward_bytes, self.backward_bytes)
        )
        taken = held * ((forwards <= action) & (action <= backwards))[:, None]
        taken += forward * (forwards == action)[:, None]
        taken += backward * (backwards == action)[:, None]
        now = levels[diagonals][:, None]
        added = self.added_by_diagonals[diagonals]
        more = added - np.take_along_axis(added, now, axis=1)
        freed = np.take_along_axis(taken, now, axis=1) - taken
        is_new = (more > 0) | ((more == 0) & (np.arange(added.shape[1]) > now))
        price = np.full(added.shape, np.inf)
        np.divide(more, freed, out=price, where=is_new & (freed > 0))
        place, level = divmod(int(price.argmin()), added.shape[1])
        return None if np.isinf(price[place, level]) else (int(diagonals[place]), level)

    def _lower(self, levels: Levels, rank: int, free: Table) -> None:
        """Give units of a rank levels that add less time, where there is room.

        Units that add most time are lowered first.

        Args:
            levels: Level of each unit, [stages, subsequences]; updated.
            rank: Pipeline rank.
            free: Free bytes during each of its actions; updated.
        """
        own = self._of_rank(rank)
        order = np.argsort(-self.added[levels[own], *own], kind="stable")
        for stage, unit in zip(*(column[order].tolist() for column in own), strict=True):
            added, now = self.added[:, stage, unit], int(levels[stage, unit])
            for level in np.argsort(added, kind="stable").tolist():
                if added[level] >= added[now]:
                    break
                span, more = self._more(stage, unit, level, now=now)
                if (more <= np.maximum(free[span], 0.0)).all():
                    levels[stage, unit] = level
                    free[span] -= more
                    break

    def _more(self, stage: int, unit: int, level: int, *, now: int) -> tuple[slice, Table]:
        """Return during which actions a unit is held, and the further bytes with another level."""
        forwards, backwards, _ = self._places
        first, last = int(forwards[stage, unit]), int(backwards[stage, unit])
        held, forward, backward = (
            table[level, stage, unit] - table[now, stage, unit]
            for table in (self.held_bytes, self.forward_bytes, self.backward_bytes)
        )
        more = np.full(last - first + 1, held)
        more[0] += forward
        more[-1] += backward
        return slice(first, last + 1), more

    def evaluated(self, levels: Levels) -> EvaluatedCandidate:
        """Return the candidate evaluated with given levels of units, [stages, subsequences]."""
        at = levels, *np.indices(levels.shape)
        tables = (
            np.stack([getattr(placement, name) for placement in self.placements])[at]
            for name in ("retained", "offloaded", "recomputed")
        )
        return EvaluatedCandidate(self.candidate, ActivationPlacement(*tables))

    def paced(self, level: int) -> LevelChoice:
        """Return the choice with ranks paced so that units fit if all have the same level."""
        running = np.stack([self.forward_bytes[level], self.backward_bytes[level]])
        paced = pace_forwards(
            self.candidate, held=self.held_bytes[level], running=running, room=self.room
        )
        return replace(self, candidate=replace(self.candidate, forwards_before_backward=paced))


def level_choice(candidate: Candidate, *, levels: Sequence[Level]) -> LevelChoice:
    """Return the choice among levels for the units of a candidate.

    Args:
        candidate: Candidate with packed sequences; its activation policy is ignored.
        levels: Levels that units may have; the last needs least memory.
    """
    seconds = stage_seconds(candidate)
    inputs = policy_inputs(candidate)
    inputs = replace(inputs, hidden_bytes=inputs.hidden_bytes * _tier_shares(candidate, inputs))
    placements = tuple(_placed_alike(level, inputs) for level in levels)
    sent = sent_bytes(candidate)
    running = [computing_bytes(candidate, own) + sent for own in placements]
    forward, backward = np.stack(running, axis=1)
    held = [placed_bytes(own, "retained", candidate=candidate) for own in placements]
    return LevelChoice(
        candidate,
        placements,
        held_bytes=np.stack(held),
        forward_bytes=forward,
        backward_bytes=backward,
        added=_seconds_added(candidate, seconds, placements),
    )


def _seconds_added(
    candidate: Candidate, seconds: StageSeconds, placements: Sequence[ActivationPlacement]
) -> Table:
    """Return the seconds that each level adds to each unit, [levels, stages, subsequences]."""
    costs = [stage_costs(candidate, seconds=seconds, placement=own) for own in placements]
    taken = np.stack([own.forward_s + own.backward_s for own in costs])
    added: Table = taken - taken.min(axis=0)
    return added


def _placed_alike(level: Level, inputs: PolicyInputs) -> ActivationPlacement:
    """Return the placement that gives every unit the same level."""
    shape = len(inputs.row_bytes), len(inputs.tokens), 3
    tokens: Counts = np.broadcast_to(inputs.tokens[None, :, None], shape)
    offloaded = decide("sppo", inputs).offloaded if level.offloads else np.zeros_like(tokens)
    recomputed: Counts = np.zeros_like(tokens)
    for index, share in ((ATTENTION, level.attention), (LINEAR, level.linear)):
        rows = np.ceil(share * inputs.tokens / ROW_ALIGNMENT).astype(np.int64) * ROW_ALIGNMENT
        left = tokens[:, :, index] - offloaded[:, :, index]
        recomputed[:, :, index] = np.minimum(rows, left)
    return ActivationPlacement(tokens - offloaded - recomputed, offloaded, recomputed)


def _tier_shares(candidate: Candidate, inputs: PolicyInputs) -> Table:
    """Return the share of what could be offloaded that the tier has room for, [stages, 1]."""
    if inputs.copy_bytes_per_s <= 0:
        return np.ones((candidate.num_stages, 1))
    wanted = (decide("sppo", inputs).offloaded @ inputs.row_bytes[:, :, None])[:, :, 0]
    of_sequences = [wanted[:, own].sum(axis=1) for own in candidate.distinct_sequences]
    wanted = of_ranks(candidate, np.max(of_sequences, axis=0) * inputs.sequences)
    shares = np.minimum(1.0, inputs.tier_bytes / np.maximum(wanted, 1.0))
    return np.tile(shares, candidate.virtual_stages)[:, None]
