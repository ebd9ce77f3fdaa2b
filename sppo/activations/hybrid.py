"""The ``hybrid`` activation policy: retain what fits, offload what overlaps, recompute the rest.

Memory freed by a copy that overlaps compute costs no time, so a stage first tries such copies
alone: every subsequence offloads what a copy at some rate transfers during the next forward,
alpha_i A_i = rate * T_(i+1), with the smallest rate at which the rest fits. If no rate suffices,
the stage offloads a fraction of all bytes that may be offloaded, waiting for copies if necessary,
and recomputes until the rest fits: the linear class first, then attention, starting with the
earliest subsequence, whose bytes are held longest. The tier is also tried filled class by class:
inputs of all subsequences first, then attention outputs.

Which fraction is best depends on the whole step, so there are several :func:`choices`. The choices
are the same on every machine: more memory only makes more of them fit, and faster copies only make
each of them faster, so a better machine never gets a slower plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from sppo.activations.placement import (
    ROW_ALIGNMENT,
    ActivationPlacement,
    Counts,
    alike_stages,
    prefix_rows,
    saved_bytes,
)
from sppo.activations.policy_inputs import CopySlots, PolicyInputs
from sppo.activations.tensor_classes import ATTENTION, CLASSES, LINEAR, X_IN
from sppo.schedule.costs import Table

_BISECTIONS = 24
_STEPS = {False: 32, True: 8}
"""Number of steps from offloading nothing to offloading everything; fewer for large tables."""
_LARGE = 4096
_TABLE_ROWS = 1 << 13
"""Placements x subsequences that are compared at once: their tables fit a processor's cache."""
_ROUNDING_BYTES = 2
"""Margin in bytes, because each memory bucket is rounded to whole bytes separately."""

StageCounts = tuple[Counts, Counts, Counts]
"""Rows retained, offloaded, recomputed, each [subsequences, 3]."""


class Offloads:
    """Bytes of each subsequence to offload, as a function of the fraction of all bytes offloaded.

    Args:
        bytes_of: Function from a fraction to bytes of each subsequence, [N]; from a column of
            fractions, [n, 1], to one row of bytes for each, [n, N].
        fits_tier: Whether given bytes of each subsequence, [N], fit the tier.
    """

    def __init__(
        self, bytes_of: Callable[[float | Table], Table], *, fits_tier: Callable[[Table], bool]
    ) -> None:
        self.bytes_of, self._fits_tier = bytes_of, fits_tier

    def up_to_tier(self, shares: Table) -> Table:
        """Return the bytes for given shares, [n], of the most that fits the tier, [n, N]."""
        return self.bytes_of(self._most_in_tier * shares[:, None])

    @cached_property
    def _most_in_tier(self) -> float:
        """Largest fraction of all bytes that fits the tier."""
        if self._fits_tier(self.bytes_of(1.0)):
            return 1.0
        fraction, _ = _bisected(
            0.0, 1.0, lambda fraction: not self._fits_tier(self.bytes_of(fraction))
        )
        return fraction


@dataclass(frozen=True, eq=False)
class StageProblem:
    """One stage of :class:`sppo.activations.policy_inputs.PolicyInputs`; tables are [N]."""

    tokens: Counts
    row_bytes: Table
    shared_input_bytes: Table
    in_flight: Counts
    sequences: int
    next_forward_s: Table
    hidden_bytes: Table
    device_bytes: float
    tier_bytes: float
    slots: CopySlots
    """Slots on the device for copies of this stage alone."""
    allow_partial: bool = True

    @cached_property
    def offloadable_bytes(self) -> Table:
        """Bytes of each subsequence that may be offloaded; 0 for the last, needed at once."""
        saved: Table = self.tokens * self.row_bytes.sum()
        saved[-1] = 0.0
        return saved

    @cached_property
    def by_time(self) -> Offloads:
        """Bytes in proportion to the time available for their copy, up to all bytes."""
        saved, next_forward_s = self.offloadable_bytes, self.next_forward_s
        most = float((saved / next_forward_s).max())

        def bytes_of(fraction: float | Table) -> Table:
            result: Table = np.minimum(fraction * most * next_forward_s, saved)
            return result

        return Offloads(bytes_of, fits_tier=self.fits_tier)

    @cached_property
    def by_class(self) -> Offloads:
        """Bytes of the first tensor classes of all subsequences, up to a fraction of all bytes."""
        saved: Table = self.tokens[:, None] * self.row_bytes
        saved[-1] = 0.0
        totals = saved.sum(axis=0)
        total, before = totals.sum(), np.concatenate([[0.0], np.cumsum(totals)[:-1]])

        def bytes_of(fraction: float | Table) -> Table:
            left = np.clip(fraction * total - before, 0.0, totals)
            shares = np.divide(left, totals, out=np.zeros_like(left), where=totals > 0)
            result: Table = shares @ saved.T
            return result

        return Offloads(bytes_of, fits_tier=self.fits_tier)

    def fits_tier(self, offloaded: Table) -> bool:
        """Return whether offloaded bytes of each subsequence fit the tier."""
        room = max(0.0, self.tier_bytes - _ROUNDING_BYTES)
        return float(offloaded.sum()) * self.sequences <= room


def choices(inputs: PolicyInputs) -> Iterator[ActivationPlacement]:
    """Yield the placements to compare; if none fits, only the placement of least memory."""
    keys = alike_stages(
        *(inputs.row_bytes, inputs.shared_input_bytes, inputs.in_flight, inputs.sequences),
        *(inputs.next_forward_s, inputs.hidden_bytes, inputs.device_bytes, inputs.tier_bytes),
        inputs.slots.row_bytes,
    )
    distinct = {stage: _problem(inputs, stage) for stage in dict.fromkeys(keys)}
    free = {key: overlapped_placement(problem) for key, problem in distinct.items()}
    least: dict[int, StageCounts] = {}
    if all(map(_has_room, distinct.values())):
        steps = _STEPS[len(inputs.tokens) * len(keys) > _LARGE]
        offloads = None in free.values() and inputs.copy_bytes_per_s > 0
        shares = np.arange(steps + 1 if offloads else 1) / steps
        found = False
        for name in ("by_time", "by_class") if offloads else ("by_time",):
            for rows in _offloading(name, shares, distinct, free):
                found = True
                yield _stacked(rows, keys)
            if not found:
                least = least or _least_memory(distinct, free)
                if not all(
                    _fits_one(*least[key][:2], problem) for key, problem in distinct.items()
                ):
                    break
        if found:
            return
    yield _stacked(least or _least_memory(distinct, free), keys)


def _offloading(
    name: Literal["by_time", "by_class"],
    shares: Table,
    distinct: Mapping[int, StageProblem],
    free: Mapping[int, StageCounts | None],
) -> Iterator[dict[int, StageCounts]]:
    """Yield the placements of all stages that offload some share and fit, share by share.

    Args:
        name: Rule by which stages offload.
        shares: Shares of the most that fits the tier.
        distinct: Stages that differ, by key.
        free: Placement of each stage that neither recomputes nor waits; None to offload by share.
    """
    of_shares = {
        key: placements_of_bytes(problem, getattr(problem, name).up_to_tier(shares))
        for key, problem in distinct.items()
        if free[key] is None
    }
    for step in range(len(shares)):
        rows = {key: free[key] or of_shares[key][step] for key in distinct}
        fitting = {key: table for key, table in rows.items() if table is not None}
        if len(fitting) == len(rows):
            yield fitting


def _least_memory(
    distinct: Mapping[int, StageProblem], free: Mapping[int, StageCounts | None]
) -> dict[int, StageCounts]:
    """Return the placement of least memory of each stage without a free one, which fits anyway."""
    return {key: free[key] or least_memory_placement(problem) for key, problem in distinct.items()}


def overlapped_placement(problem: StageProblem) -> StageCounts | None:
    """Return the placement without recomputation and waits for copies; None if it does not fit."""
    if not _has_room(problem):
        return None
    rows, nothing = _all_rows(problem), np.zeros((len(problem.tokens), 3), dtype=np.int64)
    if _fits_one(rows, nothing, problem):
        return rows, nothing, nothing.copy()

    def wanted(rate: float) -> Table:
        hidden = np.minimum(rate * problem.next_forward_s, problem.hidden_bytes)
        result: Table = np.minimum(hidden, problem.offloadable_bytes)
        return result

    def serves(rate: float) -> bool:
        offloaded = _offloaded(wanted(rate), problem)
        return _fits_one(rows - offloaded, offloaded, problem)

    # Slightly above the largest rate, so that every subsequence offloads all its hidden_bytes.
    most = float((problem.hidden_bytes / problem.next_forward_s).max()) * (1 + 1e-9)
    if not problem.fits_tier(wanted(most)):
        most, _ = _bisected(0.0, most, lambda rate: not problem.fits_tier(wanted(rate)))
    if most <= 0 or not serves(most):
        return None
    _, rate = _bisected(0.0, most, serves)
    offloaded = _offloaded(wanted(rate), problem)
    return rows - offloaded, offloaded, nothing


def placements_of_bytes(problem: StageProblem, wanted: Table) -> list[StageCounts | None]:
    """Return placements that offload given bytes and recompute until the rest fits.

    Args:
        problem: Inputs of one stage, which has room on the device.
        wanted: Bytes of each subsequence to offload, [n, N].

    Returns:
        Placement for each row of `wanted`; None if it does not fit.
    """
    offloaded = _offloaded(wanted, problem)
    retained = _all_rows(problem) - offloaded
    serving = _serving(retained, offloaded, problem)
    fits = serving.any(axis=1) & np.array([problem.fits_tier(asked) for asked in wanted])
    left = retained.copy()
    cut = np.flatnonzero(fits & ~serving[:, 0])
    left[cut] = _recomputing(
        retained[cut], offloaded[cut], problem, fewest=serving[cut].argmax(axis=1)
    )
    return [
        (left[place], offloaded[place], retained[place] - left[place]) if fits[place] else None
        for place in range(len(wanted))
    ]


def _recomputing(
    retained: Counts, offloaded: Counts, problem: StageProblem, *, fewest: Counts
) -> Counts:
    """Return the retained rows of n placements that recompute the fewest classes, [n, N, 3].

    Of the last class, only as many rows as necessary are recomputed if it may be cut.

    Args:
        retained: Retained rows before, [n, N, 3].
        offloaded: Offloaded rows, [n, N, 3].
        problem: Inputs of one stage.
        fewest: Number of classes with which each placement fits, at least 1, [n].
    """
    before, after = _freed(retained, fewest - 1), _freed(retained, fewest)
    if not problem.allow_partial or not len(retained):
        return after
    count, places = len(problem.tokens), np.arange(len(retained))
    index = (fewest - 1) % count
    tensor_class = np.where(fewest > count, ATTENTION, LINEAR)
    sent = offloaded[places, index]
    is_cut = (sent > 0) & (sent < problem.tokens[index][:, None])
    is_cut[places, tensor_class] = False
    row_bytes = problem.row_bytes[tensor_class] * problem.in_flight[index]
    short = _needed(before, offloaded, problem) - problem.device_bytes + _ROUNDING_BYTES
    # Where attention is recomputed, every layer saves its input.
    inputs = before[places, index, X_IN] * problem.in_flight[index] * problem.shared_input_bytes
    short += inputs * (tensor_class == ATTENTION)
    rows = np.ceil(short / row_bytes / ROW_ALIGNMENT).astype(np.int64) * ROW_ALIGNMENT
    in_part = before.copy()
    in_part[places, index, tensor_class] -= np.minimum(rows, before[places, index, tensor_class])
    # Joining the parts of a cut class takes memory.
    parts = ~is_cut.any(axis=1) & _fits(in_part, offloaded, problem)
    return np.where(parts[:, None, None], in_part, after)


def _serving(retained: Counts, offloaded: Counts, problem: StageProblem) -> npt.NDArray[np.bool_]:
    """Return whether placements fit with their first classes recomputed; see :func:`_freed`.

    Recomputing a class frees its own rows; but if layers share an input, recomputing the attention
    class makes every layer save its input. Memory for joining cut classes is that of the worst
    subsequence, among those with the class recomputed and those after them.

    Args:
        retained: Retained rows of n placements, [n, N, 3].
        offloaded: Offloaded rows of n placements, [n, N, 3].
        problem: Inputs of one stage.

    Returns:
        Whether each placement fits with 0 to 2 N classes recomputed, [n, 2 N + 1].
    """
    count = len(problem.tokens)
    held = (retained * problem.row_bytes) * problem.in_flight[:, None]
    more_inputs = (retained[:, :, ATTENTION] > 0) * problem.shared_input_bytes
    more_held = retained[:, :, X_IN] * more_inputs * problem.in_flight
    attention = held[:, :, ATTENTION] - more_held
    freed = np.cumsum(np.concatenate([held[:, :, LINEAR], attention], axis=1), axis=1)
    joined = []
    for classes in ([], [LINEAR], [LINEAR, ATTENTION]):
        left = retained.copy()
        left[:, :, classes] = 0
        recomputed = problem.tokens[:, None] - left - offloaded
        joined.append(problem.slots.joined(ActivationPlacement(left, offloaded, recomputed)))
    needed = np.empty((len(retained), 2 * count + 1))
    for first, (before, after) in enumerate(pairwise(joined)):
        worst = needed[:, first * count : (first + 1) * count + 1]
        worst[:, :count] = np.maximum.accumulate(before[:, ::-1], axis=1)[:, ::-1]
        worst[:, count] = 0.0
        worst[:, 1:] = np.maximum(worst[:, 1:], np.maximum.accumulate(after, axis=1))
    needed += held.sum(axis=(1, 2))[:, None] + problem.slots.of_blocks(offloaded)[:, None]
    needed[:, 1:] -= freed
    fits: npt.NDArray[np.bool_] = needed <= problem.device_bytes - _ROUNDING_BYTES
    more_sent = np.cumsum(offloaded[:, :, X_IN] * more_inputs, axis=1)
    sent = (offloaded @ problem.row_bytes).sum(axis=1)[:, None] + more_sent
    fits[:, count + 1 :] &= sent * problem.sequences <= problem.tier_bytes
    return fits


def least_memory_placement(problem: StageProblem) -> StageCounts:
    """Return the placement of least memory: best fraction offloaded, the rest recomputed.

    Offloaded rows need slots for their copies, which may take more memory than offloading frees.
    """
    shares = np.arange(_STEPS[False] + 1) / _STEPS[False]
    offloads = problem.by_time, problem.by_class
    wanted = np.concatenate([each.up_to_tier(shares) for each in offloads])
    at_once = max(1, _TABLE_ROWS // wanted.shape[1])
    tables = np.split(wanted, range(at_once, len(wanted), at_once))
    # If layers share an input, retained attention may take less than the inputs of all layers.
    kept = ((X_IN,), (X_IN, ATTENTION))[: 1 + bool(problem.shared_input_bytes)]
    found = (_least_of(table, classes, problem) for classes in kept for table in tables)
    return min(found, key=lambda least: least[0])[1]


def _least_of(
    wanted: Table, classes: Sequence[int], problem: StageProblem
) -> tuple[float, StageCounts]:
    """Return the least of n placements, and the device bytes that it needs; inf beyond the tier.

    Args:
        wanted: Bytes of each subsequence to offload, [n, N].
        classes: Classes of which the rows that are not offloaded are retained.
        problem: Inputs of one stage.
    """
    offloaded = _offloaded(wanted, problem)
    is_retained = np.array([each in classes for each in range(len(CLASSES))])
    rest = problem.tokens[:, None] - offloaded
    retained, recomputed = rest * is_retained, rest * ~is_retained
    needed = _needed(retained, offloaded, problem)
    sent = _saved(offloaded, recomputed, problem).sum(axis=1) * problem.sequences
    needed = np.where(sent <= problem.tier_bytes, needed, np.inf)
    best = int(np.argmin(needed))
    return float(needed[best]), (retained[best], offloaded[best], recomputed[best])


def _bisected(low: float, high: float, is_high: Callable[[float], bool]) -> tuple[float, float]:
    """Return neighbours between which `is_high` turns true; `is_high` must be true of `high`."""
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_high(middle) else (middle, high)
    return low, high


def _all_rows(problem: StageProblem) -> Counts:
    return np.repeat(problem.tokens[:, None], 3, axis=1)


def _offloaded(wanted: Table, problem: StageProblem) -> Counts:
    return prefix_rows(
        wanted,
        tokens=problem.tokens,
        row_bytes=problem.row_bytes,
        allow_partial=problem.allow_partial,
    )


def _has_room(problem: StageProblem) -> bool:
    """Return whether the device has any memory left; most divisions of devices leave none."""
    return problem.device_bytes >= _ROUNDING_BYTES


def _fits_one(retained: Counts, offloaded: Counts, problem: StageProblem) -> bool:
    """Return whether a placement fits the device, with rows [N, 3]."""
    return bool(_fits(retained[None], offloaded[None], problem)[0])


def _fits(retained: Counts, offloaded: Counts, problem: StageProblem) -> npt.NDArray[np.bool_]:
    """Return whether each of n placements fits the device, [n]; see :func:`_needed`."""
    fits: npt.NDArray[np.bool_] = (
        _needed(retained, offloaded, problem) <= problem.device_bytes - _ROUNDING_BYTES
    )
    return fits


def _needed(retained: Counts, offloaded: Counts, problem: StageProblem) -> Table:
    """Return the device bytes of n placements at the worst moment: retained rows, and slots, [n].

    Args:
        retained: Retained rows, [n, N, 3].
        offloaded: Offloaded rows, [n, N, 3]; the others are recomputed.
        problem: Inputs of one stage.
    """
    recomputed = problem.tokens[:, None] - retained - offloaded
    held = _saved(retained, recomputed, problem) @ problem.in_flight
    placement = ActivationPlacement(retained, offloaded, recomputed)
    needed: Table = held + problem.slots.reserved(placement)
    return needed


def _saved(rows: Counts, recomputed: Counts, problem: StageProblem) -> Table:
    """Return the bytes of given rows of each subsequence, [..., N]."""
    return saved_bytes(
        rows,
        recomputed=recomputed,
        row_bytes=problem.row_bytes,
        shared_input_bytes=problem.shared_input_bytes,
    )


def _freed(retained: Counts, counts: Counts) -> Counts:
    """Return the retained rows of n placements without their first classes to recompute, [n, N, 3].

    The order is the linear class of all subsequences, then their attention class.

    Args:
        retained: Retained rows, [n, N, 3].
        counts: Number of classes to recompute, [n].
    """
    left, index = retained.copy(), np.arange(retained.shape[1])
    left[:, :, LINEAR] *= index >= counts[:, None]
    left[:, :, ATTENTION] *= index >= counts[:, None] - len(index)
    return left


def _problem(inputs: PolicyInputs, stage: int) -> StageProblem:
    return StageProblem(
        tokens=inputs.tokens,
        row_bytes=inputs.row_bytes[stage],
        shared_input_bytes=inputs.shared_input_bytes[stage],
        in_flight=inputs.in_flight[stage],
        sequences=int(inputs.sequences[stage]),
        next_forward_s=inputs.next_forward_s[stage],
        hidden_bytes=inputs.hidden_bytes[stage],
        device_bytes=float(inputs.device_bytes[stage]),
        tier_bytes=float(inputs.tier_bytes[stage]),
        slots=inputs.slots.of_stage(stage),
        allow_partial=inputs.allow_partial,
    )


def _stacked(solved: Mapping[int, StageCounts], keys: Sequence[int]) -> ActivationPlacement:
    """Return the placement of all stages, [stages], from that of the first stage of each kind."""
    places = {key: place for place, key in enumerate(solved)}
    index = [places[key] for key in keys]
    of_stages = (np.stack(tables)[index] for tables in zip(*solved.values(), strict=True))
    return ActivationPlacement(*of_stages, known_alike=keys)
