"""Levels: the placement of saved tensors, unit by unit, by integer program.

Every unit of a step has a *level*: all is retained, what hides behind compute is offloaded, or
attention, the linear class or both are recomputed, with or without that. What one rank recomputes
other ranks wait for, so units on one diagonal of the pipeline have the same level and add what the
slowest of them adds (:mod:`sppo.planning.elastic.windows`); of all choices whose windows fit, the
integer program makes the one that adds least. Where a rank then has room left, its units are
recomputed less, which costs nobody anything.

That is InfiniPipe's stage-aware chunk-level adaptive checkpointing, where a level is a number of
layers, all of whose tensors are recomputed, and the sum of these numbers is least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy import sparse

from sppo.activations.placement import ROW_ALIGNMENT, ActivationPlacement, Counts, PolicyInputs
from sppo.activations.policy import decide
from sppo.activations.tensor_classes import ATTENTION, LINEAR
from sppo.cost.candidate import Candidate
from sppo.cost.memory.unit_messages import sent_bytes
from sppo.cost.memory.unit_working_sets import computing_bytes
from sppo.cost.memory.units_in_flight import Running, UnitsInFlight
from sppo.cost.stage_cost import StageSeconds, copy_bytes_per_s, placed_bytes, stage_seconds
from sppo.planning.elastic.level_program import ROUNDING, LevelProgram, Levels, solve
from sppo.planning.elastic.pacing import begun_within, can_be_paced
from sppo.planning.elastic.windows import Places, RankWindows, rank_windows
from sppo.planning.search.evaluated_candidate import (
    EvaluatedCandidate,
    StepPrices,
    assess,
    assess_placement,
    memory_without_activations,
)
from sppo.planning.search.policy_inputs import policy_inputs
from sppo.planning.search.simulated_candidate import simulate_candidate
from sppo.schedule.costs import Table

_ATTEMPTS = 3
"""Times that levels are chosen anew with less room, as what they come to takes more."""


@dataclass(frozen=True, slots=True)
class Level:
    """Fate of one unit's saved tensors: recomputed shares, and whether the rest is offloaded.

    Attributes:
        attention: Share of the rows of the attention class that backward recomputes.
        linear: Share of the rows of the linear class that backward recomputes.
        offloads: Whether what hides behind compute leaves the device first.
    """

    attention: float = 0.0
    linear: float = 0.0
    offloads: bool = False


LEVELS = (Level(), Level(linear=1.0), Level(attention=1.0), Level(1.0, 1.0))
"""Levels of a machine without another tier, the one that takes least memory last."""
OFFLOADING_LEVELS = (*LEVELS, *(replace(level, offloads=True) for level in LEVELS))
"""Levels where there is one."""


def checkpointing_levels(layers: int) -> tuple[Level, ...]:
    """Return InfiniPipe's levels: none to all layers of a stage recomputed.

    All layers of a stage save alike, so a number of them counts as that share of all their rows.
    """
    return tuple(Level(count / layers, count / layers) for count in range(layers + 1))


def place_levels(
    candidate: Candidate,
    *,
    levels: Sequence[Level],
    counts_shares: bool = False,
    paces: bool = False,
    below: float = np.inf,
) -> EvaluatedCandidate | None:
    """Return the candidate with levels chosen by integer program; None where the last does not fit.

    Where no choice is found that fits and adds little enough, all units have the last level.

    Args:
        candidate: with packed sequences; its policy is not asked.
        levels: that units may have, the one that takes least memory last.
        counts_shares: minimise the shares recomputed instead of the seconds added, as InfiniPipe
            does.
        paces: whether ranks begin forwards later where not even the last level fits otherwise.
        below: what is minimised is of interest below this.
    """
    choice = _level_choice(candidate, levels=levels, counts_shares=counts_shares)
    least = np.full((candidate.num_stages, len(candidate.lengths)), len(levels) - 1)
    everything = choice.evaluated(least)
    if everything.shortfall is not None and paces and can_be_paced(candidate):
        choice = choice.paced(least, room=choice.peak_bytes(least) - _excess_bytes(everything))
        everything = choice.evaluated(least)
    if everything.shortfall is not None:
        return None
    room = choice.peak_bytes(least) - _excess_bytes(everything)
    for _ in range(_ATTEMPTS):
        of_diagonals = solve(choice.program(room), below=below)
        if of_diagonals is None:
            break
        chosen = choice.of_units(of_diagonals, room=room)
        found = choice.evaluated(chosen)
        if found.shortfall is None:
            return found
        if found.shortfall.place != "device":
            break
        room = np.minimum(room, choice.peak_bytes(chosen) - _excess_bytes(found))
    return everything


def everything_recomputed(candidate: Candidate) -> EvaluatedCandidate | None:
    """Return the candidate with everything recomputed, simulated; None where that does not fit."""
    placed = place_levels(candidate, levels=LEVELS[-1:], paces=True)
    return None if placed is None else simulate_candidate(placed)


def fastest_levels(candidate: Candidate) -> EvaluatedCandidate | None:
    """Return the candidate with the levels that are fastest as simulated; None where none fits.

    Offloading takes room for copies, so levels without it are tried, too, unless nothing has to be
    recomputed with it.

    Args:
        candidate: with packed sequences; its policy is not asked.
    """
    retaining = simulate_candidate(assess(replace(candidate, policy="retain")))
    if retaining.shortfall is None:
        return retaining
    has_tier = copy_bytes_per_s(candidate)[0] > 0 and candidate.kv != "recomputed"
    found: list[EvaluatedCandidate] = []
    for levels in (OFFLOADING_LEVELS, LEVELS) if has_tier else (LEVELS,):
        fastest_s = min((one.step_s for one in found), default=np.inf)
        below = fastest_s - retaining.step_s
        placed = place_levels(candidate, levels=levels, paces=True, below=below)
        if placed is None:
            continue
        found.append(simulate_candidate(placed))
        if not placed.placement.recomputed.any():
            break
    return min(found, key=lambda one: one.step_s, default=None)


def _excess_bytes(evaluated: EvaluatedCandidate) -> Table:
    """Return the bytes that each rank lacks; below 0 those that it has left, [ranks]."""
    totals = [float(rank.device.total_bytes) for rank in evaluated.memory]
    excess: Table = np.array(totals) - evaluated.candidate.budget_bytes
    return excess


@dataclass(frozen=True, eq=False)
class _LevelChoice:
    """Bytes and seconds of a candidate at every level. Tables are [levels, stages, subsequences].

    Attributes:
        candidate: Whose.
        placements: Of each level, as if all units had it.
        held_bytes: Retained of a unit from its forward to the end of its backward.
        forward_bytes: What its forward takes while it runs.
        backward_bytes: What its backward takes while it runs.
        added: Seconds that the level adds, or the shares that it recomputes.
        tier_share: Bytes offloaded, over those that a sequence may offload on the stage.
        lowers: Whether units have lower levels than their diagonals where their rank has room.
    """

    candidate: Candidate
    placements: tuple[ActivationPlacement, ...]
    held_bytes: Table
    forward_bytes: Table
    backward_bytes: Table
    added: Table
    tier_share: Table
    lowers: bool

    @cached_property
    def windows(self) -> tuple[RankWindows, ...]:
        """Windows of each rank."""
        return rank_windows(self.candidate)

    def program(self, room: Table) -> LevelProgram:
        """Return the integer program for so much room on each rank, [ranks]."""
        diagonals = max(int(own.diagonals.max()) for own in self.windows) + 1
        cost = np.zeros((diagonals, len(self.placements)))
        used, left = [], []
        for own in self.windows:
            np.maximum.at(cost, own.diagonals, own.of_units(self.added))
            used.append(self._used(own, diagonals))
            left.append(room[own.rank] - own.fixed_bytes)
            if self.tier_share.any():
                used.append(self._tier_used(own, diagonals))
                left.append(np.ones(used[-1].shape[0]))
        windows = sparse.csr_array(sparse.vstack(used))
        return LevelProgram(cost, windows, np.concatenate(left))

    def of_units(self, of_diagonals: Levels, *, room: Table) -> Levels:
        """Return the level of each unit, [stages, subsequences], from those of the diagonals."""
        levels = np.zeros(self.held_bytes.shape[1:], dtype=np.intp)
        for own in self.windows:
            of_units = of_diagonals[own.diagonals]
            if self.lowers:
                of_units = self._lowered(of_units, own, room=float(room[own.rank]))
            levels[own.stages, own.units] = of_units
        return levels

    def evaluated(self, levels: Levels) -> EvaluatedCandidate:
        """Return the candidate with levels of units, [stages, subsequences]."""
        at = levels, *np.indices(levels.shape)
        tables = (
            np.stack([getattr(placement, name) for placement in self.placements])[at]
            for name in ("retained", "offloaded", "recomputed")
        )
        return assess_placement(self.candidate, ActivationPlacement(*tables))

    def paced(self, levels: Levels, *, room: Table) -> _LevelChoice:
        """Return the choice where ranks run only as far ahead as units with such levels fit.

        Args:
            levels: of units, [stages, subsequences].
            room: of each rank, [ranks].
        """
        held, forward, backward = (
            np.take_along_axis(table, levels[None], axis=0)[0]
            for table in (self.held_bytes, self.forward_bytes, self.backward_bytes)
        )
        running = Running(forward, backward)
        begun = begun_within(self.candidate, held=held, running=running, room=room)
        return replace(self, candidate=replace(self.candidate, begun=begun))

    def peak_bytes(self, levels: Levels) -> Table:
        """Return what the fullest window of each rank takes, [ranks]."""
        return np.array(
            [
                self._taken(own, levels[own.stages, own.units]).max(initial=0.0)
                for own in self.windows
            ]
        )

    def _taken(self, own: RankWindows, levels: Levels) -> Table:
        """Return the bytes that units of a rank with such levels take of its windows, [moments]."""
        held = own.of_units(self.held_bytes)[np.arange(len(levels)), levels]
        running = self._running_bytes(own)[np.arange(len(own.running)), levels[own.running]]
        taken: Table = own.holds @ held + running + own.fixed_bytes
        return taken

    def _used(self, own: RankWindows, diagonals: int) -> sparse.csr_array:
        """Bytes of a rank's windows by level of each diagonal, [moments, diagonals * levels]."""
        moments, places = np.nonzero(own.holds)
        values = own.of_units(self.held_bytes)[places]
        values[own.running[moments] == places] += self._running_bytes(own)
        shape = len(own.running), diagonals
        return _spread(values, moments, own.diagonals[places], shape=shape)

    def _tier_used(self, own: RankWindows, diagonals: int) -> sparse.csr_array:
        """Share of the tier that each sequence takes on each stage, by level of each diagonal."""
        sequences = self.candidate.distinct_sequences
        sequence_of = np.repeat(np.arange(len(sequences)), [s.stop - s.start for s in sequences])
        keys = own.stages * len(sequences) + sequence_of[own.units]
        _, rows = np.unique(keys, return_inverse=True)
        shape = int(rows.max()) + 1, diagonals
        return _spread(own.of_units(self.tier_share), rows, own.diagonals, shape=shape)

    def _lowered(self, levels: Levels, own: RankWindows, *, room: float) -> Levels:
        """Return levels of a rank's units that add no more each, and fit in its windows."""
        added, held, tier = map(own.of_units, (self.added, self.held_bytes, self.tier_share))
        running, levels = self._running_bytes(own), levels.copy()
        free = room * (1 - ROUNDING) - self._taken(own, levels)
        for unit in np.argsort(-added[np.arange(len(levels)), levels], kind="stable").tolist():
            now = int(levels[unit])
            runs = own.running == unit
            for level in np.argsort(added[unit], kind="stable").tolist():
                if added[unit, level] >= added[unit, now]:
                    break
                more = own.holds[:, unit] * (held[unit, level] - held[unit, now])
                more = more + runs * (running[:, level] - running[:, now])
                if tier[unit, level] <= tier[unit, now] and (more <= np.maximum(free, 0.0)).all():
                    levels[unit], free = level, free - more
                    break
        return levels

    def _running_bytes(self, own: RankWindows) -> Table:
        """Return the bytes that run at every moment, by level, [moments, levels]."""
        backward, forward = (
            own.of_units(table)[own.running] for table in (self.backward_bytes, self.forward_bytes)
        )
        running: Table = np.where(own.is_backward[:, None], backward, forward)
        return running


def _spread(
    values: Table, rows: Places, diagonals: Places, *, shape: tuple[int, int]
) -> sparse.csr_array:
    """Return a matrix with values [n, levels] in some rows, in the columns of some diagonals."""
    count = values.shape[1]
    columns = diagonals[:, None] * count + np.arange(count)
    at = np.repeat(rows, count), columns.ravel()
    return sparse.csr_array((values.ravel(), at), shape=(shape[0], shape[1] * count))


def _level_choice(
    candidate: Candidate, *, levels: Sequence[Level], counts_shares: bool
) -> _LevelChoice:
    seconds = stage_seconds(candidate)
    inputs = policy_inputs(
        candidate,
        seconds=seconds,
        in_flight=np.ones((candidate.num_stages, len(candidate.lengths)), dtype=np.int64),
        units=UnitsInFlight(candidate),
        states=memory_without_activations(candidate),
    )
    placements = tuple(_placed_alike(level, inputs) for level in levels)
    sent = sent_bytes(candidate)
    running = [computing_bytes(candidate, own) + sent for own in placements]
    held = [
        placed_bytes(own.retained, recomputed=own.recomputed, candidate=candidate)
        for own in placements
    ]
    tier = np.stack([(own.offloaded @ inputs.row_bytes[:, :, None])[:, :, 0] for own in placements])
    tier *= inputs.sequences[:, None]
    share = np.divide(tier, inputs.tier_bytes[:, None], out=np.zeros_like(tier), where=tier > 0)
    return _LevelChoice(
        candidate,
        placements,
        held_bytes=np.stack(held),
        forward_bytes=np.stack([own.forward for own in running]),
        backward_bytes=np.stack([own.backward for own in running]),
        added=_shares(candidate, levels)
        if counts_shares
        else _seconds_added(candidate, seconds, placements),
        tier_share=share,
        lowers=not counts_shares,
    )


def _shares(candidate: Candidate, levels: Sequence[Level]) -> Table:
    """Shares that levels recompute, [levels, stages, subsequences]."""
    shares = np.array([level.attention + level.linear for level in levels]) / 2
    of_units: Table = np.ones((1, candidate.num_stages, len(candidate.lengths)))
    return shares[:, None, None] * of_units


def _seconds_added(
    candidate: Candidate, seconds: StageSeconds, placements: Sequence[ActivationPlacement]
) -> Table:
    """Seconds that levels add to a unit, [levels, stages, subsequences]."""
    costs = [StepPrices(candidate, seconds, own).costs for own in placements]
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
