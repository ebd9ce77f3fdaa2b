"""Levels: placement of saved tensors per unit, chosen by integer program.

Every unit of a step has a *level*: whether backward recomputes the attention class, the linear
class, both or neither, and whether tensors are offloaded as far as the copies hide behind compute.
Other ranks wait for recomputation on one rank, so the units of one diagonal of the pipeline have
the same level and add the time that the slowest of them adds
(:mod:`sppo.planning.elastic.windows`). Of all choices whose windows fit, the integer program takes
the one that adds least time. Afterwards, units of ranks with free memory recompute less, which
slows down no rank.

This corresponds to InfiniPipe's stage-aware chunk-level adaptive checkpointing, where a level is
the number of layers that are recomputed whole, and the sum of these numbers is minimised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy import sparse

from sppo.activations.placement import ROW_ALIGNMENT, ActivationPlacement, Counts
from sppo.activations.policy import decide
from sppo.activations.policy_inputs import PolicyInputs
from sppo.activations.tensor_classes import ATTENTION, LINEAR
from sppo.cost.candidate import Candidate
from sppo.cost.memory.unit_messages import sent_bytes
from sppo.cost.memory.unit_working_sets import computing_bytes
from sppo.cost.memory.units_in_flight import Running, UnitsInFlight
from sppo.cost.stage_cost import StageSeconds, copy_bytes_per_s, placed_bytes, stage_seconds
from sppo.planning.elastic.level_program import ROUNDING, LevelProgram, Levels, solve
from sppo.planning.elastic.pacing import can_be_paced, pace_forwards
from sppo.planning.elastic.windows import RankWindows, rank_windows
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.evaluation import evaluate_candidate, evaluate_placement
from sppo.planning.search.memory_bounds import memory_without_activations
from sppo.planning.search.policy_inputs import policy_inputs
from sppo.planning.search.simulated_candidate import simulate_candidate
from sppo.planning.search.step_prices import StepPrices
from sppo.schedule.costs import Table
from sppo.schedule.orders.steps import Indices

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


def checkpointing_levels(layers: int) -> tuple[Level, ...]:
    """Return InfiniPipe's levels: from no to all layers of a stage recomputed.

    All layers of a stage save equally much, so a number of layers is modelled as the same share of
    the rows of all layers.
    """
    return tuple(Level(count / layers, count / layers) for count in range(layers + 1))


def place_levels(
    candidate: Candidate,
    *,
    levels: Sequence[Level],
    counts_shares: bool = False,
    paces: bool = False,
) -> EvaluatedCandidate | None:
    """Return the candidate with levels chosen by integer program.

    If no choice is found that fits, all units have the last level.

    Args:
        candidate: Candidate with packed sequences; its activation policy is ignored.
        levels: Levels that units may have; the last needs least memory.
        counts_shares: Whether to minimise recomputed shares instead of added seconds, as InfiniPipe
            does.
        paces: Whether ranks may begin forwards later if not even the last level fits otherwise.

    Returns:
        The evaluated candidate; None if not even the last level fits.
    """
    choice = _level_choice(candidate, levels=levels, counts_shares=counts_shares)
    if paces and not choice.fits and can_be_paced(candidate):
        choice = choice.paced(len(levels) - 1)
    return choice.least_added()


def everything_recomputed(candidate: Candidate) -> EvaluatedCandidate | None:
    """Return the candidate with everything recomputed, simulated; None if that does not fit."""
    placed = place_levels(candidate, levels=LEVELS[-1:], paces=True)
    return None if placed is None else simulate_candidate(placed)


def fastest_levels(candidate: Candidate) -> EvaluatedCandidate | None:
    """Return the candidate with the levels that simulate fastest; None if none fits.

    Offloading needs memory for slots of copies, so levels without offloading are tried, too, unless
    unpaced levels with offloading recompute nothing. Paced ranks that begin fewer forwards idle
    more, and have room to recompute less: the pacings of all levels are tried.

    Args:
        candidate: Candidate with packed sequences; its activation policy is ignored.
    """
    retaining = simulate_candidate(evaluate_candidate(replace(candidate, policy="retain")))
    if retaining.shortfall is None:
        return retaining
    has_tier = copy_bytes_per_s(candidate)[0] > 0 and candidate.kv != "recomputed"
    found: list[EvaluatedCandidate] = []
    for levels in (OFFLOADING_LEVELS, LEVELS) if has_tier else (LEVELS,):
        for choice in _choices(candidate, levels=levels):
            fastest_s = min((one.step_s for one in found), default=np.inf)
            placed = choice.least_added(below=fastest_s - retaining.step_s)
            if placed is not None:
                found.append(simulate_candidate(placed))
        if any(map(_runs_freely, found)):
            break
    return min(found, key=lambda one: one.step_s, default=None)


def _runs_freely(placed: EvaluatedCandidate) -> bool:
    """Return whether a candidate recomputes nothing, and its ranks are not paced."""
    paced = placed.candidate.forwards_before_backward
    return not (placed.placement.recomputed.any() or paced)


def _choices(candidate: Candidate, *, levels: Sequence[Level]) -> Iterator[_LevelChoice]:
    """Yield the choice among levels; if not even the last level fits, under each pacing.

    The pacing of the last level comes first.
    """
    choice = _level_choice(candidate, levels=levels, counts_shares=False)
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
class _LevelChoice:
    """Bytes and seconds of a candidate at every level. Tables are [levels, stages, subsequences].

    Attributes:
        candidate: Candidate whose units get levels.
        placements: Placement with all units at the level, per level.
        held_bytes: Bytes that a unit retains from its forward to the end of its backward.
        forward_bytes: Bytes that the forward of a unit needs while it runs.
        backward_bytes: Bytes that the backward of a unit needs while it runs.
        added: Seconds that the level adds, or the share that it recomputes.
        tier_share: Offloaded bytes, over the bytes that a sequence may offload on the rank.
        lowers: Whether units may recompute less than their diagonals if their rank has room.
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
        """Windows of each pipeline rank."""
        return rank_windows(self.candidate)

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
        return self.peak_bytes(self._last_level) - _excess_bytes(self.least_memory)

    @property
    def _last_level(self) -> Levels:
        return np.full(self.held_bytes.shape[1:], len(self.placements) - 1)

    def least_added(self, *, below: float = np.inf) -> EvaluatedCandidate | None:
        """Return the candidate with levels that cost least; None if not even the last level fits.

        If no choice is found that fits and costs less than `below`, all units have the last level.

        Args:
            below: Upper bound of the minimised cost; choices that cost as much are not wanted.
        """
        if not self.fits:
            return None
        room = self.room
        for _ in range(_ATTEMPTS):
            of_diagonals = solve(self.program(room), below=below)
            if of_diagonals is None:
                break
            chosen = self.of_units(of_diagonals, room=room)
            found = self.evaluated(chosen)
            if found.shortfall is None:
                return found
            if found.shortfall.place != "device":
                break
            room = np.minimum(room, self.peak_bytes(chosen) - _excess_bytes(found))
        return self.least_memory

    def program(self, room: Table) -> LevelProgram:
        """Return the integer program for the given room in bytes on each rank, [ranks]."""
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
        """Return the level of each unit, [stages, subsequences], from the levels of diagonals."""
        levels = np.zeros(self.held_bytes.shape[1:], dtype=np.intp)
        for own in self.windows:
            of_units = of_diagonals[own.diagonals]
            if self.lowers:
                of_units = self._lowered(of_units, own, room=float(room[own.rank]))
            levels[own.stages, own.units] = of_units
        return levels

    def evaluated(self, levels: Levels) -> EvaluatedCandidate:
        """Return the candidate evaluated with given levels of units, [stages, subsequences]."""
        at = levels, *np.indices(levels.shape)
        tables = (
            np.stack([getattr(placement, name) for placement in self.placements])[at]
            for name in ("retained", "offloaded", "recomputed")
        )
        return evaluate_placement(self.candidate, ActivationPlacement(*tables))

    def paced(self, level: int) -> _LevelChoice:
        """Return the choice with ranks paced so that units fit if all have the same level."""
        running = Running(self.forward_bytes[level], self.backward_bytes[level])
        paced = pace_forwards(
            self.candidate, held=self.held_bytes[level], running=running, room=self.room
        )
        return replace(self, candidate=replace(self.candidate, forwards_before_backward=paced))

    def peak_bytes(self, levels: Levels) -> Table:
        """Return the bytes of the fullest window of each rank, [ranks]."""
        return np.array(
            [
                self._taken(own, levels[own.stages, own.units]).max(initial=0.0)
                for own in self.windows
            ]
        )

    def _taken(self, own: RankWindows, levels: Levels) -> Table:
        """Return the bytes of a rank's windows with given levels of its units, [moments]."""
        held = own.of_units(self.held_bytes)[np.arange(len(levels)), levels]
        running = self._running_bytes(own)[np.arange(len(own.running)), levels[own.running]]
        taken: Table = own.holds @ held + running + own.fixed_bytes
        return taken

    def _used(self, own: RankWindows, diagonals: int) -> sparse.csr_array:
        """Return the bytes that each level of each diagonal adds to a rank's windows.

        Returns:
            A matrix [moments, diagonals * levels].
        """
        moments, places = np.nonzero(own.holds)
        values = own.of_units(self.held_bytes)[places]
        values[own.running[moments] == places] += self._running_bytes(own)
        shape = len(own.running), diagonals
        return _spread(values, moments, own.diagonals[places], shape=shape)

    def _tier_used(self, own: RankWindows, diagonals: int) -> sparse.csr_array:
        """Return the share of the tier that each level of each diagonal takes, per sequence.

        Returns:
            A matrix [sequences, diagonals * levels].
        """
        sequences = self.candidate.distinct_sequences
        sequence_of = np.repeat(np.arange(len(sequences)), [s.stop - s.start for s in sequences])
        rows, shape = sequence_of[own.units], (len(sequences), diagonals)
        return _spread(own.of_units(self.tier_share), rows, own.diagonals, shape=shape)

    def _lowered(self, levels: Levels, own: RankWindows, *, room: float) -> Levels:
        """Return levels of a rank's units that add no more time than `levels`, and fit.

        Units that add most time are lowered first.
        """
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
        """Return the bytes that the unit running at each moment needs, [moments, levels]."""
        backward, forward = (
            own.of_units(table)[own.running] for table in (self.backward_bytes, self.forward_bytes)
        )
        running: Table = np.where(own.is_backward[:, None], backward, forward)
        return running


def _spread(
    values: Table, rows: Indices, diagonals: Indices, *, shape: tuple[int, int]
) -> sparse.csr_array:
    """Return a sparse matrix with `values` [n, levels] at given rows and columns of diagonals.

    Args:
        values: Values of all levels, [n, levels].
        rows: Row of each, [n].
        diagonals: Diagonal of each, whose levels are adjacent columns, [n].
        shape: Numbers of rows and of diagonals.
    """
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
    held = [placed_bytes(own, "retained", candidate=candidate) for own in placements]
    tier = np.stack([(own.offloaded @ inputs.row_bytes[:, :, None])[:, :, 0] for own in placements])
    tier *= inputs.sequences[:, None]
    room = np.tile(inputs.tier_bytes, candidate.virtual_stages)[:, None]
    share = np.divide(tier, room, out=np.zeros_like(tier), where=tier > 0)
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
    """Return the share that each level recomputes, [levels, stages, subsequences]."""
    shares = np.array([level.attention + level.linear for level in levels]) / 2
    of_units: Table = np.ones((1, candidate.num_stages, len(candidate.lengths)))
    return shares[:, None, None] * of_units


def _seconds_added(
    candidate: Candidate, seconds: StageSeconds, placements: Sequence[ActivationPlacement]
) -> Table:
    """Return the seconds that each level adds to each unit, [levels, stages, subsequences]."""
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
