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
from itertools import pairwise

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
from sppo.activations.tensor_classes import ATTENTION, LINEAR, X_IN
from sppo.schedule.costs import Table

_BISECTIONS = 24
_STEPS = {False: 32, True: 8}
"""Number of steps from offloading nothing to offloading everything; fewer for large tables."""
_LARGE = 4096
_ROUNDING_BYTES = 2
"""Margin in bytes, because each memory bucket is rounded to whole bytes separately."""

WantedBytes = Callable[["StageProblem", float | Table], Table]
"""Function from a fraction of all bytes that may be offloaded to bytes of each subsequence,
[subsequences]."""
StageCounts = tuple[Counts, Counts, Counts]
"""Rows retained, offloaded, recomputed, each [subsequences, 3]."""


@dataclass(frozen=True, slots=True, eq=False)
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

    @property
    def offloadable_bytes(self) -> Table:
        """Bytes of each subsequence that may be offloaded; 0 for the last, needed at once."""
        saved: Table = self.tokens * self.row_bytes.sum()
        saved[-1] = 0.0
        return saved


def choices(inputs: PolicyInputs) -> Iterator[ActivationPlacement]:
    """Yield the placements to compare; if none fits, only the placement of least memory."""
    keys = alike_stages(
        *(inputs.row_bytes, inputs.shared_input_bytes, inputs.in_flight, inputs.sequences),
        *(inputs.next_forward_s, inputs.hidden_bytes, inputs.device_bytes, inputs.tier_bytes),
        inputs.slots.row_bytes,
    )
    distinct = {stage: _problem(inputs, stage) for stage in dict.fromkeys(keys)}
    free = {key: overlapped_placement(problem) for key, problem in distinct.items()}
    steps = _STEPS[len(inputs.tokens) * len(keys) > _LARGE]
    offloads = None in free.values() and inputs.copy_bytes_per_s > 0
    tried = np.arange(steps + 1 if offloads else 1) / steps
    found = False
    for wanted in (_by_time, _by_class) if offloads else (_by_time,):
        offloading = {
            key: []
            if free[key]
            else placements_of_fractions(
                problem, fractions=_most_in_tier(problem, wanted) * tried, wanted=wanted
            )
            for key, problem in distinct.items()
        }
        for step in range(len(tried)):
            rows = {key: free[key] or offloading[key][step] for key in distinct}
            fitting = {key: table for key, table in rows.items() if table is not None}
            if len(fitting) == len(rows):
                found = True
                yield _stacked(fitting, keys)
        if found:
            continue
        short = {
            key: free[key] or least_memory_placement(problem) for key, problem in distinct.items()
        }
        if not all(_fits(*short[key][:2], problem) for key, problem in distinct.items()):
            break
    if not found:
        yield _stacked(short, keys)


def overlapped_placement(problem: StageProblem) -> StageCounts | None:
    """Return the placement without recomputation and waits for copies; None if it does not fit."""
    if not _has_room(problem):
        return None
    rows, nothing = _all_rows(problem), np.zeros((len(problem.tokens), 3), dtype=np.int64)
    if _fits(rows, nothing, problem):
        return rows, nothing, nothing.copy()

    def wanted(rate: float) -> Table:
        hidden = np.minimum(rate * problem.next_forward_s, problem.hidden_bytes)
        result: Table = np.minimum(hidden, problem.offloadable_bytes)
        return result

    def serves(rate: float) -> bool:
        offloaded = _offloaded(wanted(rate), problem)
        return _fits(rows - offloaded, offloaded, problem)

    # Slightly above the largest rate, so that every subsequence offloads all its hidden_bytes.
    most = float((problem.hidden_bytes / problem.next_forward_s).max()) * (1 + 1e-9)
    if not _in_tier(wanted(most), problem):
        most, _ = _bisected(0.0, most, lambda rate: not _in_tier(wanted(rate), problem))
    if most <= 0 or not serves(most):
        return None
    _, rate = _bisected(0.0, most, serves)
    offloaded = _offloaded(wanted(rate), problem)
    return rows - offloaded, offloaded, nothing


def placements_of_fractions(
    problem: StageProblem, *, fractions: Table, wanted: WantedBytes | None = None
) -> list[StageCounts | None]:
    """Return placements that offload given fractions and recompute until the rest fits.

    Args:
        problem: Inputs of one stage.
        fractions: Fractions of all bytes that may be offloaded.
        wanted: Function from a fraction to bytes of each subsequence; :func:`_by_time` if not
            given.

    Returns:
        Placement for each fraction; None if it does not fit.
    """
    if not _has_room(problem):
        return [None] * len(fractions)
    wanted_bytes = (wanted or _by_time)(problem, fractions[:, None])
    offloaded = _offloaded(wanted_bytes, problem)
    retained = _all_rows(problem) - offloaded
    serving = _serving(retained, offloaded, problem)
    return [
        _recomputing(kept, sent, problem, serves=serves) if _in_tier(asked, problem) else None
        for asked, kept, sent, serves in zip(
            wanted_bytes, retained, offloaded, serving, strict=True
        )
    ]


def _recomputing(
    retained: Counts, offloaded: Counts, problem: StageProblem, *, serves: npt.NDArray[np.bool_]
) -> StageCounts | None:
    """Recompute the fewest classes with which a placement fits; None if it never fits.

    Args:
        retained: Retained rows of the placement, [N, 3].
        offloaded: Offloaded rows of the placement, [N, 3].
        problem: Inputs of one stage.
        serves: Whether the placement fits with so many classes recomputed, [2 N + 1].
    """
    if serves[0]:
        return retained, offloaded, np.zeros_like(retained)
    fewest = int(serves.argmax())
    if not serves[fewest]:
        return None
    before, after = _freed(retained, fewest - 1), _freed(retained, fewest)
    left = _last_in_part(before, after, offloaded, problem)
    return left, offloaded, retained - left


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
    fractions = np.arange(_STEPS[False] + 1)[:, None] / _STEPS[False]
    wanted = [
        wanted_bytes(problem, _most_in_tier(problem, wanted_bytes) * fractions)
        for wanted_bytes in (_by_time, _by_class)
    ]
    sent = _offloaded(np.concatenate(wanted), problem)
    # If layers share an input, retained attention may take less than the inputs of all layers.
    kept = [[X_IN], [X_IN, ATTENTION]][: 1 + bool(problem.shared_input_bytes)]
    offloaded = np.concatenate([sent] * len(kept))
    left = np.zeros_like(offloaded)
    for rows, classes in zip(np.split(left, len(kept)), kept, strict=True):
        rows[:, :, classes] = problem.tokens[:, None] - sent[:, :, classes]
    recomputed = _all_rows(problem) - offloaded - left
    tier_bytes = _saved(offloaded, recomputed, problem).sum(axis=1) * problem.sequences
    needed = _needed_by_each(left, offloaded, problem)
    best = int(np.argmin(np.where(tier_bytes <= problem.tier_bytes, needed, np.inf)))
    return left[best], offloaded[best], recomputed[best]


def _most_in_tier(problem: StageProblem, wanted: WantedBytes) -> float:
    """Return the largest fraction of all bytes that fits the tier."""
    if _in_tier(wanted(problem, 1.0), problem):
        return 1.0
    fraction, _ = _bisected(
        0.0, 1.0, lambda fraction: not _in_tier(wanted(problem, fraction), problem)
    )
    return fraction


def _bisected(low: float, high: float, is_high: Callable[[float], bool]) -> tuple[float, float]:
    """Return neighbours between which `is_high` turns true; `is_high` must be true of `high`."""
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_high(middle) else (middle, high)
    return low, high


def _all_rows(problem: StageProblem) -> Counts:
    return np.repeat(problem.tokens[:, None], 3, axis=1)


def _by_class(problem: StageProblem, fraction: float | Table) -> Table:
    """Return the bytes of the first tensor classes of all subsequences, up to a fraction of all.

    Args:
        problem: Inputs of one stage.
        fraction: Fraction of all bytes that may be offloaded; a column, [n, 1], gives one row of
            the result per fraction.
    """
    saved: Table = problem.tokens[:, None] * problem.row_bytes
    saved[-1] = 0.0
    totals = saved.sum(axis=0)
    before = np.concatenate([[0.0], np.cumsum(totals)[:-1]])
    left = np.clip(fraction * totals.sum() - before, 0.0, totals)
    shares = np.divide(left, totals, out=np.zeros_like(left), where=totals > 0)
    result: Table = shares @ saved.T
    return result


def _by_time(problem: StageProblem, fraction: float | Table) -> Table:
    """Return bytes in proportion to the time available for their copy, up to all bytes.

    Args:
        problem: Inputs of one stage.
        fraction: Fraction of all bytes that may be offloaded, as in :func:`_by_class`.
    """
    saved = problem.offloadable_bytes
    most = float((saved / problem.next_forward_s).max())
    result: Table = np.minimum(fraction * most * problem.next_forward_s, saved)
    return result


def _offloaded(wanted: Table, problem: StageProblem) -> Counts:
    return prefix_rows(
        wanted,
        tokens=problem.tokens,
        row_bytes=problem.row_bytes,
        allow_partial=problem.allow_partial,
    )


def _in_tier(wanted: Table, problem: StageProblem) -> bool:
    return float(wanted.sum()) * problem.sequences <= max(0.0, problem.tier_bytes - _ROUNDING_BYTES)


def _has_room(problem: StageProblem) -> bool:
    """Return whether the device has any memory left; most divisions of devices leave none."""
    return problem.device_bytes >= _ROUNDING_BYTES


def _fits(retained: Counts, offloaded: Counts, problem: StageProblem) -> bool:
    return _needed(retained, offloaded, problem) <= problem.device_bytes - _ROUNDING_BYTES


def _needed(retained: Counts, offloaded: Counts, problem: StageProblem) -> float:
    """Return the device bytes at the worst moment: retained rows, and slots for copies."""
    return float(_needed_by_each(retained[None], offloaded[None], problem)[0])


def _needed_by_each(retained: Counts, offloaded: Counts, problem: StageProblem) -> Table:
    """Return the device bytes that each of several placements needs, [placements]."""
    recomputed = problem.tokens[:, None] - retained - offloaded
    held = _saved(retained, recomputed, problem) @ problem.in_flight
    needed: Table = held + problem.slots.reserved(
        ActivationPlacement(retained, offloaded, recomputed)
    )
    return needed


def _saved(rows: Counts, recomputed: Counts, problem: StageProblem) -> Table:
    """Return the bytes of given rows of each subsequence, [..., N]."""
    return saved_bytes(
        rows,
        recomputed=recomputed,
        row_bytes=problem.row_bytes,
        shared_input_bytes=problem.shared_input_bytes,
    )


def _freed(retained: Counts, count: int) -> Counts:
    """Return `retained` without the first `count` classes to recompute.

    The order is the linear class of all subsequences, then their attention class.
    """
    left = retained.copy()
    left[:count, LINEAR] = 0
    left[: max(0, count - len(retained)), ATTENTION] = 0
    return left


def _last_in_part(
    before: Counts, after: Counts, offloaded: Counts, problem: StageProblem
) -> Counts:
    """Recompute only as many rows of the last class as necessary, if it may be cut."""
    index, tensor_class = (int(n) for n in np.argwhere(before != after)[0])
    others = [offloaded[index, other] for other in range(3) if other != tensor_class]
    is_cut = any(0 < rows < problem.tokens[index] for rows in others)
    if not problem.allow_partial or is_cut:
        return after
    row_bytes = float(problem.row_bytes[tensor_class]) * int(problem.in_flight[index])
    short = _needed(before, offloaded, problem) - problem.device_bytes + _ROUNDING_BYTES
    if tensor_class == ATTENTION:  # every layer saves its input then
        inputs = int(before[index, X_IN]) * int(problem.in_flight[index])
        short += inputs * float(problem.shared_input_bytes)
    rows = int(np.ceil(short / row_bytes / ROW_ALIGNMENT)) * ROW_ALIGNMENT
    left = before.copy()
    left[index, tensor_class] -= min(rows, int(before[index, tensor_class]))
    # Joining the parts of a cut class takes memory.
    return left if _fits(left, offloaded, problem) else after


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
    places = {key: place for place, key in enumerate(solved)}
    of_stages = [places[key] for key in keys]
    tables = zip(*solved.values(), strict=True)
    return ActivationPlacement(*(np.stack(table)[of_stages] for table in tables))
