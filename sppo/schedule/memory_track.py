"""Device memory of the ranks over the step, by bucket, from the times of all actions.

Buckets:

* "activations": from the start of F to the end of the unit's last B or W, or to the end of F on a
  stage without a backward. If units are copied as a
  whole, the offloaded part is freed at the end of its D2H and allocated again at the start of its
  H2D. If copies flow layer by layer, through slots that are reserved for them and not part of these
  tracks, only the part that is not offloaded counts, to the end of B; in addition the operands of a
  deferred W, from the end of its B to its own end.
* "kv": K/V of a whole sequence, from its first F on the stage to its last B, because every later
  subsequence reads them; if K/V are copied or recomputed, without the time from the last F to the
  first H2D or KV. On a stage without a backward, and of layers without one, to its last F.
* "kv_gradients": dK/dV of a whole sequence, from its first B on the stage to its last.

The activations of a borrower's shard of an MSP unit count on the borrower, not on the owner; K/V
and their gradients count on the owner alone.

Changes of memory are rows of rank, time and bytes, [3, changes].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sppo.schedule.actions import Op
from sppo.schedule.costs import Costs, Table
from sppo.schedule.graph import Floats, Ints
from sppo.schedule.schedule import Schedule

_SAME_MOMENT = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class MemoryTrack:
    """Bytes of one bucket on one rank: `values_bytes[i]` from `times_s[i]` to `times_s[i + 1]`."""

    times_s: Floats
    values_bytes: Floats

    @property
    def peak_bytes(self) -> float:
        """Peak of the bucket over the step."""
        return float(self.values_bytes.max(initial=0.0))


def memory_tracks(
    schedule: Schedule, *, starts_s: Floats, finishes_s: Floats, costs: Costs
) -> list[Mapping[str, MemoryTrack]]:
    """Return the memory of each rank by bucket, and their "total"."""
    changes = _changes(schedule, starts_s, finishes_s, costs=costs)
    changes["total"] = np.hstack([*changes.values()])
    tracks = [_tracks(own, num_ranks=schedule.num_ranks) for own in changes.values()]
    return [dict(zip(changes, own, strict=True)) for own in zip(*tracks, strict=True)]


def peak_held_bytes(
    schedule: Schedule, *, starts_s: Floats, finishes_s: Floats, costs: Costs
) -> Floats:
    """Return the peak of the "total" of each rank, [ranks]."""
    total = np.hstack([*_changes(schedule, starts_s, finishes_s, costs=costs).values()])
    return np.array([track.peak_bytes for track in _tracks(total, num_ranks=schedule.num_ranks)])


def _changes(
    schedule: Schedule, starts_s: Floats, finishes_s: Floats, *, costs: Costs
) -> dict[str, Floats]:
    """Return the changes of memory by bucket."""
    forward = schedule.of(Op.F)
    ranks, begins_s = schedule.ranks[forward], starts_s[forward]
    at, shares = (schedule.stages[forward], schedule.units[forward]), schedule.shares[forward]
    saved = costs.activation_bytes[at] * shares
    if not schedule.is_training:
        # An evaluation holds the running unit, and K/V to the program's end.
        last_s, kv_bytes = np.zeros(schedule.num_ranks), costs.kv_bytes + costs.passing_kv_bytes
        np.maximum.at(last_s, schedule.ranks[:-1], finishes_s[:-1])
        return {
            "activations": _held(ranks, begins_s, finishes_s[forward], saved),
            "kv": _held(ranks, begins_s, last_s[ranks], kv_bytes[at] * shares),
        }
    backward, weights, out, back = (
        schedule.at(code, schedule.slots[forward], schedule.shards[forward])
        for code in (Op.B, Op.W, Op.D2H, Op.H2D)
    )
    offloaded, is_deferred = costs.offload_bytes[at] * shares, weights != schedule.never
    backward_s = finishes_s[np.where(backward != schedule.never, backward, forward)]
    weights_s = np.where(is_deferred, finishes_s[weights], backward_s)
    if costs.layer_copies:
        operands = np.where(is_deferred, costs.operand_bytes[at], 0.0)
        activations = [
            _held(ranks, begins_s, backward_s, saved - offloaded),
            _held(ranks, backward_s, weights_s, operands),
        ]
    else:
        left = out != schedule.never
        away_s = finishes_s[out[left]], starts_s[back[left]]
        activations = [
            _held(ranks, begins_s, np.maximum(backward_s, weights_s), saved),
            _held(ranks[left], *away_s, -offloaded[left]),
        ]
    first_s, last_s = _first(schedule, starts_s, Op.F), _last(schedule, finishes_s, Op.B)
    gone_s, here_s = _last(schedule, finishes_s, Op.F), _first(schedule, starts_s, Op.H2D_KV, Op.KV)
    first_backward_s = _first(schedule, starts_s, Op.B)
    last_read_s = np.maximum(last_s, gone_s)
    keys = _of_sequences(schedule, first_s, last_read_s, costs.kv_bytes)
    passing = _of_sequences(schedule, first_s, gone_s, costs.passing_kv_bytes)
    absent = _of_sequences(schedule, gone_s, here_s, -costs.kv_bytes)
    return {
        "activations": np.hstack(activations),
        "kv": np.hstack([keys, passing, absent]),
        "kv_gradients": _of_sequences(schedule, first_backward_s, last_s, costs.kv_gradient_bytes),
    }


def _held(ranks: Ints, begins_s: Floats, ends_s: Floats, sizes: Floats) -> Floats:
    """Return the changes by memory that is held from `begins_s` to `ends_s`."""
    times_s, changes = np.concatenate([begins_s, ends_s]), np.concatenate([sizes, -sizes])
    return np.stack([np.tile(ranks, 2), times_s, changes])


def _first(schedule: Schedule, starts_s: Floats, *codes: int) -> Table:
    """Return the first start of some kinds of actions on the ranks of their stages.

    Returns:
        Moments, [stages, sequences]; infinity where there is no such action.
    """
    found = np.full((schedule.num_stages, schedule.num_sequences), np.inf)
    actions = schedule.of(*codes)
    own = actions[schedule.stages[actions] % schedule.num_ranks == schedule.ranks[actions]]
    np.minimum.at(found, (schedule.stages[own], schedule.sequences[own]), starts_s[own])
    return found


def _last(schedule: Schedule, finishes_s: Floats, *codes: int) -> Table:
    """Return the last end, as :func:`_first` returns the first start; minus infinity for none."""
    return -_first(schedule, -finishes_s, *codes)


def _of_sequences(schedule: Schedule, begins_s: Table, ends_s: Table, sizes: Table) -> Floats:
    """Return the changes by memory of whole sequences on the ranks of their stages.

    Args:
        schedule: Schedule with the sequences and the ranks of the stages.
        begins_s: Moment of allocation, [stages, sequences].
        ends_s: Moment of release; infinite where no memory is held.
        sizes: Bytes of every unit, [stages, units].
    """
    is_held = np.isfinite(begins_s) & np.isfinite(ends_s)
    of_sequences = np.add.reduceat(sizes, np.array(schedule.unit_offsets), axis=1)
    ranks = np.nonzero(is_held)[0] % schedule.num_ranks
    return _held(ranks, begins_s[is_held], ends_s[is_held], of_sequences[is_held])


def _tracks(changes: Floats, *, num_ranks: int) -> list[MemoryTrack]:
    """Return the memory of each rank: the running sum of its changes, one value per moment.

    Memory freed and memory allocated at the same moment never add up: the free comes first.
    """
    changes = changes[:, np.lexsort(changes[1::-1])]
    ends = np.searchsorted(changes[0], np.arange(num_ranks), side="right")
    tracks = []
    for _, times_s, changes_bytes in np.split(changes, ends, axis=1)[:-1]:
        last = np.ones(times_s.shape, dtype=bool)
        # Times summed from the same durations in another order differ in their last digits.
        last[:-1] = np.diff(times_s) > _SAME_MOMENT * times_s[-1:]
        # Rounding can make the sum slightly negative when everything is released.
        values_bytes = np.maximum(np.cumsum(changes_bytes)[last], 0.0)
        tracks.append(MemoryTrack(times_s[last], values_bytes))
    return tracks
