"""Device memory of the ranks over the step, by bucket, from the times of all actions.

Buckets:

* "activations": from the start of F to the end of the unit's last B or W. If units are copied as a
  whole, the offloaded part is freed at the end of its D2H and allocated again at the start of its
  H2D. If copies flow layer by layer, through slots that are reserved for them and not part of these
  tracks, only the part that is not offloaded counts, to the end of B; in addition the operands of a
  deferred W, from the end of its B to its own end.
* "kv": K/V of a whole sequence, from its first F on the stage to its last B, because every later
  subsequence reads them; if K/V are copied or recomputed, without the time from the last F to the
  first H2D or KV.
* "kv_gradients": dK/dV of a whole sequence, from its first B on the stage to its last.

The activations of a borrower's shard of an MSP unit count on the borrower, not on the owner; K/V
and their gradients count on the owner alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sppo.schedule.actions import Op
from sppo.schedule.costs import Costs, Table
from sppo.schedule.graph import Floats, Ints
from sppo.schedule.schedule import Schedule
from sppo.schedule.simulation.clock import Clock
from sppo.schedule.timeline import MemoryTrack

_SAME_MOMENT = 1e-9


class _Events(NamedTuple):
    """Changes of the memory of ranks, one entry each."""

    ranks: Ints
    times_s: Floats
    changes_bytes: Floats

    @classmethod
    def joined(cls, parts: Sequence[_Events]) -> _Events:
        """Return the events of all parts."""
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    def tracks(self, num_ranks: int) -> list[MemoryTrack]:
        """Return the memory of each rank."""
        order = np.lexsort((self.times_s, self.ranks))
        ends = np.searchsorted(self.ranks[order], np.arange(num_ranks), side="right")
        own = np.split(order, ends)[:-1]
        return [_track(self.times_s[events], self.changes_bytes[events]) for events in own]


def memory_tracks(
    schedule: Schedule, *, clock: Clock, costs: Costs
) -> list[Mapping[str, MemoryTrack]]:
    """Return the memory of each rank by bucket, and their "total"."""
    buckets = _buckets(schedule, clock=clock, costs=costs)
    buckets["total"] = _Events.joined([*buckets.values()])
    tracks = [events.tracks(schedule.num_ranks) for events in buckets.values()]
    return [dict(zip(buckets, own, strict=True)) for own in zip(*tracks, strict=True)]


def peak_held_bytes(schedule: Schedule, *, clock: Clock, costs: Costs) -> Floats:
    """Return the peak of the "total" of each rank, [ranks]."""
    total = _Events.joined([*_buckets(schedule, clock=clock, costs=costs).values()])
    return np.array([track.peak_bytes for track in total.tracks(schedule.num_ranks)])


def _buckets(schedule: Schedule, *, clock: Clock, costs: Costs) -> dict[str, _Events]:
    """Return the changes of the memory of all ranks by bucket."""
    if not schedule.is_training:
        return _forward_only(schedule, clock=clock, costs=costs)
    first_s, last_s = _first_starts(schedule, clock, Op.F), _last_finishes(schedule, clock, Op.B)
    gone_s, back_s = (
        _last_finishes(schedule, clock, Op.F),
        _first_starts(schedule, clock, Op.H2D_KV, Op.KV),
    )
    first_backward_s = _first_starts(schedule, clock, Op.B)
    keys = _of_sequences(schedule, first_s, last_s, costs.kv_bytes)
    absent = _of_sequences(schedule, gone_s, back_s, -costs.kv_bytes)
    gradients = _of_sequences(schedule, first_backward_s, last_s, costs.kv_gradient_bytes)
    return {
        "activations": _activations(schedule, clock=clock, costs=costs),
        "kv": _Events.joined([keys, absent]),
        "kv_gradients": gradients,
    }


def _held(ranks: Ints, begins_s: Floats, ends_s: Floats, sizes: Floats) -> _Events:
    """Return the events of memory that is held from `begins_s` to `ends_s`."""
    return _Events(
        np.tile(ranks, 2), np.concatenate([begins_s, ends_s]), np.concatenate([sizes, -sizes])
    )


def _forward_only(schedule: Schedule, *, clock: Clock, costs: Costs) -> dict[str, _Events]:
    """Return the buckets of an evaluation: the running unit, and K/V to the program's end."""
    forward = schedule.of(Op.F)
    ranks, at = schedule.ranks[forward], (schedule.stages[forward], schedule.units[forward])
    begins_s, ends_s = clock.starts_s[forward], clock.finishes_s[forward]
    last_s = np.zeros(schedule.num_ranks)
    np.maximum.at(last_s, schedule.ranks[:-1], clock.finishes_s[:-1])
    shares = schedule.shares[forward]
    return {
        "activations": _held(ranks, begins_s, ends_s, costs.activation_bytes[at] * shares),
        "kv": _held(ranks, begins_s, last_s[ranks], costs.kv_bytes[at] * shares),
    }


def _activations(schedule: Schedule, *, clock: Clock, costs: Costs) -> _Events:
    """Return the changes of saved activations of the units and shards that ranks run."""
    starts_s, finishes_s = clock.starts_s, clock.finishes_s
    forward = schedule.of(Op.F)
    slots, shards, ranks = (
        column[forward] for column in (schedule.slots, schedule.shards, schedule.ranks)
    )
    backward, weights, out, back = (
        schedule.at(code, slots, shards) for code in (Op.B, Op.W, Op.D2H, Op.H2D)
    )
    at, shares = (schedule.stages[forward], schedule.units[forward]), schedule.shares[forward]
    size, offloaded = costs.activation_bytes[at] * shares, costs.offload_bytes[at] * shares
    deferred = weights != schedule.never
    begins_s, backward_s = starts_s[forward], finishes_s[backward]
    weights_s = np.where(deferred, finishes_s[weights], backward_s)
    if costs.layer_copies:
        operands = np.where(deferred, costs.operand_bytes[at], 0.0)
        return _Events.joined(
            [
                _held(ranks, begins_s, backward_s, size - offloaded),
                _held(ranks, backward_s, weights_s, operands),
            ]
        )
    left = out != schedule.never
    away = _held(ranks[left], finishes_s[out[left]], starts_s[back[left]], -offloaded[left])
    ends_s = np.maximum(backward_s, weights_s)
    return _Events.joined([_held(ranks, begins_s, ends_s, size), away])


def _first_starts(schedule: Schedule, clock: Clock, *codes: int) -> Table:
    """Return the first start of some kinds of actions, [stages, sequences]; infinity for none."""
    found = np.full((schedule.num_stages, schedule.num_sequences), np.inf)
    own, places = _of_owners(schedule, *codes)
    np.minimum.at(found, places, clock.starts_s[own])
    return found


def _last_finishes(schedule: Schedule, clock: Clock, code: int) -> Table:
    """Return the last end of a kind of actions, [stages, sequences]; minus infinity for none."""
    found = np.full((schedule.num_stages, schedule.num_sequences), -np.inf)
    own, places = _of_owners(schedule, code)
    np.maximum.at(found, places, clock.finishes_s[own])
    return found


def _of_owners(schedule: Schedule, *codes: int) -> tuple[Ints, tuple[Ints, Ints]]:
    """Return actions of some kinds on the ranks of their stages, and (stages, sequences)."""
    found = schedule.of(*codes)
    own = found[schedule.stages[found] % schedule.num_ranks == schedule.ranks[found]]
    return own, (schedule.stages[own], schedule.sequences[own])


def _of_sequences(schedule: Schedule, begins_s: Table, ends_s: Table, sizes: Table) -> _Events:
    """Return the events of memory of whole sequences on the ranks of their stages.

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


def _track(times_s: Floats, changes_bytes: Floats) -> MemoryTrack:
    """Return the running sum of changes in order, one value per moment.

    Memory freed and memory allocated at the same moment never add up: the free comes first.
    """
    values = np.cumsum(changes_bytes)
    last = np.ones(times_s.shape, dtype=bool)
    # Times summed from the same durations in another order differ in their last digits.
    last[:-1] = np.diff(times_s) > _SAME_MOMENT * times_s[-1:]
    # Rounding can make the sum slightly negative when everything is released.
    return MemoryTrack(times_s[last], np.maximum(values[last], 0.0))
