"""Levels: placement of saved tensors per unit, so that every rank has room at every moment.

Every unit of a step has a *level*: whether backward recomputes the attention class, the linear
class, both or neither, and whether tensors are offloaded as far as the copies hide behind compute.
All units begin with the level that adds least time. While a rank lacks memory, a unit gets another
level: of the units held at the fullest moment of all ranks, the one that adds least time for each
byte that it frees then. Other ranks wait for recomputation on one rank, so time counts twice if a
unit recomputes for longer than all other units of its diagonal of the pipeline.

InfiniPipe's stage-aware chunk-level adaptive checkpointing makes the choice by integer program; its
level is the number of layers that are recomputed whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sppo.activations.placement import ActivationPlacement, Counts
from sppo.activations.policy import decide
from sppo.activations.policy_inputs import PolicyInputs
from sppo.activations.tensor_classes import ATTENTION, LINEAR
from sppo.cost.candidate import Candidate, of_ranks
from sppo.cost.memory.messages import sent_bytes
from sppo.cost.memory.unit_working_sets import computing_bytes
from sppo.cost.memory.walk import kv_held, walk_of
from sppo.cost.stages.links import copy_bytes_per_s
from sppo.cost.stages.saved_bytes import placed_bytes
from sppo.cost.stages.seconds import weight_operand_bytes
from sppo.cost.stages.stage_cost import stage_costs
from sppo.planning.elastic.pacing import can_be_paced, pace_forwards
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.planning.search.policy_inputs import policy_inputs
from sppo.schedule.costs import Table
from sppo.schedule.graph import Ints
from sppo.schedule.orders.names import DEFERRING_WEIGHTS

Levels = npt.NDArray[np.intp]
"""Level of each unit, [stages, subsequences]."""

_RECOMPUTED = ((), (LINEAR,), (ATTENTION,), (ATTENTION, LINEAR))
"""Tensor classes that levels recompute; the last needs least memory."""


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
    for offloads in (True, False) if has_tier else (False,):
        for choice in level_choices(candidate, offloads=offloads):
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


def level_choices(candidate: Candidate, *, offloads: bool) -> Iterator[LevelChoice]:
    """Yield the choice among levels; if not even the last level fits, under each pacing.

    The pacing of the last level comes first.
    """
    choice = level_choice(candidate, offloads=offloads)
    if choice.fits or not can_be_paced(candidate):
        yield choice
        return
    paced = map(choice.paced, reversed(range(len(choice.placements))))
    yield from {own.candidate.forwards_before_backward: own for own in paced}.values()


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
        totals = [float(rank.device.total_bytes) for rank in self.least_memory.memory]
        taken = self.taken(self._last_level).max(axis=1)
        room: Table = taken - (np.array(totals) - self.candidate.budget_bytes)
        return room

    @property
    def _last_level(self) -> Levels:
        return np.full(self.added.shape[1:], len(self.placements) - 1)

    def least_added(self) -> EvaluatedCandidate | None:
        """Return the candidate with levels that add little; None if not even the last level fits.

        If no choice is found that fits, all units have the last level.
        """
        if not self.fits:
            return None
        chosen = self.levels(self.room)
        found = self.least_memory if chosen is None else self.evaluated(chosen)
        return found if found.shortfall is None else self.least_memory

    def levels(self, room: Table) -> Levels | None:
        """Return the level of each unit, [stages, subsequences]; None if none are found that fit.

        Args:
            room: Bytes on each rank for units and their K and V, [ranks].
        """
        levels: Levels = self.added.argmin(axis=0)
        diagonals = self._places[2]
        slowest = np.zeros(int(diagonals.max()) + 1)
        np.maximum.at(slowest, diagonals, self.added.min(axis=0))
        left = room[:, None] - self.taken(levels)
        while left.min() < 0:
            rank, action = divmod(int(left.argmin()), left.shape[1])
            change = self._cheapest(levels, slowest, rank, action)
            if change is None:
                return None
            stage, unit, level = change
            self._set_level(levels, left[rank], stage, unit, level)
            diagonal = diagonals[stage, unit]
            slowest[diagonal] = max(slowest[diagonal], self.added[level, stage, unit])
        return levels

    def taken(self, levels: Levels) -> Table:
        """Return the bytes of units and their K and V during each action, [ranks, actions]."""
        at, walk = (levels, *np.indices(levels.shape)), walk_of(self.candidate)
        running = np.stack([self.forward_bytes[at], self.backward_bytes[at]])
        return self.fixed_bytes + walk.held(self.held_bytes[at]) + walk.running(running)

    @cached_property
    def fixed_bytes(self) -> Table:
        """Bytes during each action that do not depend on levels, [ranks, actions].

        K and V, their gradients, and operands of the weight gradients that earlier backwards have
        deferred.
        """
        walk, (kv, gradients) = walk_of(self.candidate), kv_held(self.candidate)
        operands = weight_operand_bytes(self.candidate)
        waiting = walk.held(np.zeros_like(operands), deferred=operands)
        fixed: Table = kv + gradients + waiting - walk.of_actions(operands) * (walk.defers > 0)
        return fixed

    @cached_property
    def _places(self) -> tuple[Ints, Ints, Ints]:
        """Places of each unit's F and B among its rank's actions, and its diagonal."""
        walk, ranks = walk_of(self.candidate), self.candidate.pipeline_parallel_degree
        counts = np.cumsum(walk.is_backward, axis=1) + np.arange(ranks)[::-1, None] - 1
        actions = np.broadcast_to(np.arange(counts.shape[1]), counts.shape)
        forwards, backwards, diagonals = np.zeros((3, *self.added.shape[1:]), dtype=np.intp)
        for table, which, values in (
            (forwards, walk.is_forward, actions),
            (backwards, walk.is_backward, actions),
            (diagonals, walk.is_backward, counts),
        ):
            table[walk.stages[which], walk.units[which]] = values[which]
        return forwards, backwards, diagonals

    def _cheapest(
        self, levels: Levels, slowest: Table, rank: int, action: int
    ) -> tuple[int, int, int] | None:
        """Return the stage, subsequence and level that free memory at a moment most cheaply.

        The level adds more time than that of the unit now, so that no level comes back.

        Args:
            levels: Level of each unit.
            slowest: Seconds that the slowest unit of each diagonal adds, [diagonals].
            rank: Pipeline rank.
            action: Place of the action that runs at that moment.
        """
        ranks = self.candidate.pipeline_parallel_degree
        own = np.s_[:, rank::ranks]
        forwards, backwards, diagonals = (places[own[1]] for places in self._places)
        taken = self.held_bytes[own] * ((forwards <= action) & (action <= backwards))
        taken += self.forward_bytes[own] * (forwards == action)
        taken += self.backward_bytes[own] * (backwards == action)
        now, added = levels[None, own[1]], self.added[own]
        more = added - np.take_along_axis(added, now, axis=0)
        freed = np.take_along_axis(taken, now, axis=0) - taken
        is_later = np.arange(len(added))[:, None, None] > now
        price = np.full(added.shape, np.inf)
        is_new = (more > 0) | ((more == 0) & is_later)
        waiting = np.maximum(0.0, added - slowest[diagonals])
        np.divide(more + waiting, freed, out=price, where=is_new & (freed > 0))
        level, turn, unit = map(int, np.unravel_index(price.argmin(), price.shape))
        if np.isinf(price[level, turn, unit]):
            return None
        return rank + ranks * turn, unit, level

    def _set_level(self, levels: Levels, free: Table, stage: int, unit: int, level: int) -> None:
        """Change the level of a unit, and the bytes that are free during actions of its rank."""
        now = int(levels[stage, unit])
        first, last = (int(places[stage, unit]) for places in self._places[:2])
        held, forward, backward = (
            float(table[level, stage, unit] - table[now, stage, unit])
            for table in (self.held_bytes, self.forward_bytes, self.backward_bytes)
        )
        free[first : last + 1] -= held
        free[first] -= forward
        free[last] -= backward
        levels[stage, unit] = level

    def evaluated(self, levels: Levels) -> EvaluatedCandidate:
        """Return the candidate evaluated with given levels of units, [stages, subsequences]."""
        at = levels, *np.indices(levels.shape)
        tables = (np.stack(own)[at] for own in zip(*self.placements, strict=True))
        return EvaluatedCandidate(self.candidate, ActivationPlacement(*tables))

    def paced(self, level: int) -> LevelChoice:
        """Return the choice with ranks paced so that units fit if all have the same level."""
        running = np.stack([self.forward_bytes[level], self.backward_bytes[level]])
        paced = pace_forwards(
            self.candidate, held=self.held_bytes[level], running=running, room=self.room
        )
        return replace(self, candidate=replace(self.candidate, forwards_before_backward=paced))


def level_choice(candidate: Candidate, *, offloads: bool) -> LevelChoice:
    """Return the choice among levels for the units of a candidate.

    Args:
        candidate: Candidate with packed sequences; its activation policy is ignored.
        offloads: Whether there are also levels that offload.
    """
    inputs = policy_inputs(candidate)
    placements = tuple(_placements(candidate, inputs, offloads=offloads))
    sent = sent_bytes(candidate)
    running = [computing_bytes(candidate, own) + sent for own in placements]
    held = np.stack([placed_bytes(own, "retained", candidate=candidate) for own in placements])
    forward, backward = np.stack(running, axis=1)
    if candidate.schedule in DEFERRING_WEIGHTS:
        # Operands of a weight half are allocated before the unit's saved tensors are freed.
        backward = backward + np.maximum(0.0, weight_operand_bytes(candidate) - held)
    costs = [stage_costs(candidate, own) for own in placements]
    taken_s = np.stack([own.forward_s + own.backward_s for own in costs])
    return LevelChoice(
        candidate,
        placements,
        held_bytes=held,
        forward_bytes=forward,
        backward_bytes=backward,
        added=taken_s - taken_s.min(axis=0),
    )


def _placements(
    candidate: Candidate, inputs: PolicyInputs, *, offloads: bool
) -> Iterator[ActivationPlacement]:
    """Yield the placement of each level if all units have it."""
    tokens: Counts = np.broadcast_to(inputs.tokens[:, None], (*inputs.in_flight.shape, 3))
    nothing = np.zeros_like(tokens)
    hidden = [_hidden(candidate, inputs)] if offloads else []
    for offloaded in (nothing, *hidden):
        for classes in _RECOMPUTED:
            recomputed = np.zeros_like(tokens)
            recomputed[:, :, classes] = (tokens - offloaded)[:, :, classes]
            yield ActivationPlacement(tokens - offloaded - recomputed, offloaded, recomputed)


def _hidden(candidate: Candidate, inputs: PolicyInputs) -> Counts:
    """Return the rows whose copies hide behind compute, fewer if the tier has no room for them."""
    offloaded = decide("sppo", inputs).offloaded
    wanted = (offloaded @ inputs.row_bytes[:, :, None])[:, :, 0]
    of_sequences = [wanted[:, own].sum(axis=1) for own in candidate.distinct_sequences]
    wanted = of_ranks(candidate, np.max(of_sequences, axis=0) * inputs.sequences)
    shares = np.minimum(1.0, inputs.tier_bytes / np.maximum(wanted, 1.0))
    hidden_bytes = inputs.hidden_bytes * np.tile(shares, candidate.virtual_stages)[:, None]
    return decide("sppo", replace(inputs, hidden_bytes=hidden_bytes)).offloaded
