"""Device memory of a rank over the step, by bucket, from the times of its actions.

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

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sppo.schedule import encoding
from sppo.schedule.costs import Costs, Table
from sppo.schedule.encoding import Codes, EncodedProgram
from sppo.schedule.msp_groups import MspGroup, shard_shares
from sppo.schedule.schedule import Schedule
from sppo.schedule.timeline import Floats, MemoryTrack

_SAME_MOMENT = 1e-9
_Events = tuple[Floats, Floats]


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedProgram:
    """Program of one rank, with the start and end of each action in a simulation."""

    rank: int
    program: EncodedProgram
    start_s: Floats
    finish_s: Floats

    def forward_slots(self) -> tuple[Codes, Codes]:
        """Return the slots of the rank's units and shards, ascending, and the places of their F."""
        which = np.flatnonzero(self.program.codes == encoding.F)
        order = np.argsort(self.program.slots[which], kind="stable")
        return self.program.slots[which][order], which[order].astype(np.int32)

    def at(self, code: int, *, slots: Codes, times: Floats) -> Floats:
        """Return `times` of the actions of one kind by slot; NaN for slots without an action."""
        by_slot = np.full(slots.shape, np.nan)
        which = self.program.codes == code
        by_slot[np.searchsorted(slots, self.program.slots[which])] = times[which]
        return by_slot


def memory_tracks(
    schedule: Schedule,
    *,
    simulated: SimulatedProgram,
    groups: Mapping[int, MspGroup],
    costs: Costs,
) -> Mapping[str, MemoryTrack]:
    """Return the memory of one rank by bucket, and their "total"."""
    slots, indices = simulated.forward_slots()
    shares = shard_shares(simulated.program, groups=groups)[indices]
    if (simulated.program.codes == encoding.B).any():
        buckets = {
            "activations": _activation_events(simulated, slots=slots, shares=shares, costs=costs),
            "kv": _concatenate(
                _sequence_events(
                    schedule, simulated=simulated, first=encoding.F, sizes=costs.kv_bytes
                ),
                _absent_kv(schedule, simulated=simulated, sizes=costs.kv_bytes),
            ),
            "kv_gradients": _sequence_events(
                schedule, simulated=simulated, first=encoding.B, sizes=costs.kv_gradient_bytes
            ),
        }
    else:
        buckets = _forward_only(simulated, slots=slots, shares=shares, costs=costs)
    tracks = {name: _track(events) for name, events in buckets.items()}
    tracks["total"] = _track(_concatenate(*buckets.values()))
    return tracks


def _forward_only(
    simulated: SimulatedProgram, *, slots: Codes, shares: Floats, costs: Costs
) -> dict[str, _Events]:
    """Return the buckets of an evaluation: the running unit, and K/V to the program's end."""
    begin = simulated.at(encoding.F, slots=slots, times=simulated.start_s)
    finish = simulated.at(encoding.F, slots=slots, times=simulated.finish_s)
    size = _per_slot(costs.activation_bytes, slots=slots, num_units=costs.num_units) * shares
    kv = _per_slot(costs.kv_bytes, slots=slots, num_units=costs.num_units) * shares
    end = np.full(slots.shape, simulated.finish_s.max(initial=0.0))
    return {
        "activations": _concatenate((begin, size), (finish, -size)),
        "kv": _concatenate((begin, kv), (end, -kv)),
    }


def _per_slot(table: Table, *, slots: Codes, num_units: int) -> Floats:
    """Return the values of a [stage, unit] table, which may be a broadcast view, at given slots."""
    return table[slots // num_units, slots % num_units]


def _activation_events(
    simulated: SimulatedProgram, *, slots: Codes, shares: Floats, costs: Costs
) -> _Events:
    """Return the changes of saved activations of the units and shards that a rank runs."""
    units = costs.num_units
    begin = simulated.at(encoding.F, slots=slots, times=simulated.start_s)
    backward = simulated.at(encoding.B, slots=slots, times=simulated.finish_s)
    weights = simulated.at(encoding.W, slots=slots, times=simulated.finish_s)
    size = _per_slot(costs.activation_bytes, slots=slots, num_units=units) * shares
    offloaded = _per_slot(costs.offload_bytes, slots=slots, num_units=units) * shares
    if costs.layer_copies:
        deferred = ~np.isnan(weights)
        owned = backward[deferred]
        operands = _per_slot(costs.operand_bytes, slots=slots, num_units=units)[deferred]
        return _concatenate(
            (begin, size - offloaded),
            (backward, offloaded - size),
            (owned, operands),
            (weights[deferred], -operands),
        )
    end = np.fmax(backward, weights)
    out = simulated.at(encoding.D2H, slots=slots, times=simulated.finish_s)
    back = simulated.at(encoding.H2D, slots=slots, times=simulated.start_s)
    left, returned = ~np.isnan(out), ~np.isnan(back)
    return _concatenate(
        (begin, size),
        (end, -size),
        (out[left], -offloaded[left]),
        (back[returned], offloaded[returned]),
    )


def _sequence_events(
    schedule: Schedule, *, simulated: SimulatedProgram, first: int, sizes: Table
) -> _Events:
    """Return the changes of memory held per sequence, from its first action to its last B.

    Args:
        schedule: Schedule with the sequences and the ranks of the stages.
        simulated: Program of the rank.
        first: Opcode of the first action, F or B.
        sizes: Bytes of every unit, [stages, units].
    """
    of_sequences = np.add.reduceat(sizes, np.array(schedule.unit_offsets), axis=1)
    begins, ends = np.full(of_sequences.size, np.inf), np.zeros(of_sequences.size)
    which, group = _by_sequence(schedule, simulated, first)
    np.minimum.at(begins, group, simulated.start_s[which])
    which, group = _by_sequence(schedule, simulated, encoding.B)
    np.maximum.at(ends, group, simulated.finish_s[which])
    held = np.isfinite(begins)
    total = of_sequences.ravel()[held]
    return _concatenate((begins[held], total), (ends[held], -total))


def _absent_kv(schedule: Schedule, *, simulated: SimulatedProgram, sizes: Table) -> _Events:
    """Return the changes of K/V that leave after the last F until the first H2D or KV."""
    of_sequences = np.add.reduceat(sizes, np.array(schedule.unit_offsets), axis=1)
    gone, back = np.zeros(of_sequences.size), np.full(of_sequences.size, np.inf)
    which, group = _by_sequence(schedule, simulated, encoding.F)
    np.maximum.at(gone, group, simulated.finish_s[which])
    for code in (encoding.H2D_KV, encoding.KV):
        which, group = _by_sequence(schedule, simulated, code)
        np.minimum.at(back, group, simulated.start_s[which])
    leaves = np.isfinite(back)
    total = of_sequences.ravel()[leaves]
    return _concatenate((gone[leaves], -total), (back[leaves], total))


def _by_sequence(schedule: Schedule, simulated: SimulatedProgram, code: int) -> tuple[Codes, Codes]:
    """Return positions of one kind of action on the rank's own stages, and (stage, sequence)."""
    offsets = np.array(schedule.unit_offsets)
    rank_of = np.array([schedule.placement.rank_of(s) for s in range(schedule.num_stages)])
    which = np.flatnonzero(simulated.program.codes == code)
    stages, unit = np.divmod(simulated.program.slots[which], schedule.num_units)
    sequence = np.searchsorted(offsets, unit, side="right") - 1
    own = rank_of[stages] == simulated.rank
    return which[own], (stages * len(offsets) + sequence)[own]


def _concatenate(*events: _Events) -> _Events:
    times = np.concatenate([times for times, _ in events])
    changes = np.concatenate([changes for _, changes in events])
    return times, changes


def _track(events: _Events) -> MemoryTrack:
    """Return the running sum of changes, one value per moment.

    Memory freed and memory allocated at the same moment never add up: the free comes first.
    """
    times, changes = events
    order = np.argsort(times, kind="stable")
    times, values = times[order], np.cumsum(changes[order])
    last = np.ones(times.shape, dtype=bool)
    # Times summed from the same durations in another order differ in their last digits.
    last[:-1] = np.diff(times) > _SAME_MOMENT * times[-1:]
    # Rounding can make the sum slightly negative when everything is released.
    return MemoryTrack(times[last], np.maximum(values[last], 0.0))
