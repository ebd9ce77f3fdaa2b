"""Device memory of a rank over the step, by bucket, from the times of its actions.

Buckets:

* "activations": from the start of F to the end of the unit's last B or W. Where the program
  copies a unit away, the moved share leaves with the end of its D2H and is back, as room that is
  taken, from the start of its H2D.
* "kv": K/V of a unit, from its F to the end of its B; never copied away with the activations,
  because every later subsequence reads it.
* "kv_gradients": dK/dV of a whole sequence, from its first B on the stage to its last.

A borrower's shard of an MSP unit counts its part of the activations there, not on the owner.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sppo.schedule import encoding
from sppo.schedule.actions import Schedule
from sppo.schedule.costs import Costs, Table
from sppo.schedule.encoding import Codes, EncodedProgram
from sppo.schedule.timeline import Floats, MemoryTrack

_SAME_MOMENT = 1e-9
_Events = tuple[Floats, Floats]


def memory_tracks(
    schedule: Schedule,
    *,
    program: EncodedProgram,
    start_s: Floats,
    finish_s: Floats,
    costs: Costs,
) -> Mapping[str, MemoryTrack]:
    """Memory of one rank by bucket, and their "total"."""
    if not (program.codes == encoding.B).any():
        return _forward_only(program, start_s=start_s, finish_s=finish_s, costs=costs)
    held, widths = _held(program)
    units = schedule.num_units
    begin = _at_kind(program, encoding.F, held=held, times=start_s)
    end = _at_kind(program, encoding.B, held=held, times=finish_s)
    end = np.fmax(end, _at_kind(program, encoding.W, held=held, times=finish_s))
    out = _at_kind(program, encoding.D2H, held=held, times=finish_s)
    back = _at_kind(program, encoding.H2D, held=held, times=start_s)
    size = _per_slot(costs.activation_bytes, slots=held, num_units=units) / widths
    offloaded = _per_slot(costs.offload_bytes, slots=held, num_units=units) / widths
    left, returned = ~np.isnan(out), ~np.isnan(back)
    activations = _concatenate(
        (begin, size),
        (end, -size),
        (out[left], -offloaded[left]),
        (back[returned], offloaded[returned]),
    )
    kv = _per_slot(costs.kv_bytes, slots=held, num_units=units) / widths
    buckets = {
        "activations": activations,
        "kv": _concatenate((begin, kv), (end, -kv)),
        "kv_gradients": _gradient_events(
            schedule, program=program, start_s=start_s, finish_s=finish_s, costs=costs
        ),
    }
    tracks = {name: _track(events) for name, events in buckets.items()}
    tracks["total"] = _track(_concatenate(*buckets.values()))
    return tracks


def _forward_only(
    program: EncodedProgram, *, start_s: Floats, finish_s: Floats, costs: Costs
) -> Mapping[str, MemoryTrack]:
    """Evaluation keeps nothing but the unit that runs; K/V stays to the end of its sequence."""
    which = program.codes == encoding.F
    slots = program.slots[which]
    widths = program.num_shards[which]
    units = costs.num_units
    size = _per_slot(costs.activation_bytes, slots=slots, num_units=units) / widths
    kv = _per_slot(costs.kv_bytes, slots=slots, num_units=units) / widths
    end = np.full(slots.shape, finish_s.max(initial=0.0))
    buckets = {
        "activations": _concatenate((start_s[which], size), (finish_s[which], -size)),
        "kv": _concatenate((start_s[which], kv), (end, -kv)),
    }
    tracks = {name: _track(events) for name, events in buckets.items()}
    tracks["total"] = _track(_concatenate(*buckets.values()))
    return tracks


def _held(program: EncodedProgram) -> tuple[Codes, Codes]:
    """Slots a rank runs forward, ascending, and into how many shards each is cut."""
    which = program.codes == encoding.F
    order = np.argsort(program.slots[which], kind="stable")
    return program.slots[which][order], program.num_shards[which][order]


def _at_kind(program: EncodedProgram, code: int, *, held: Codes, times: Floats) -> Floats:
    """`times` of the actions of one kind for each held slot; not-a-number where there is none."""
    by_slot = np.full(held.shape, np.nan)
    which = program.codes == code
    by_slot[np.searchsorted(held, program.slots[which])] = times[which]
    return by_slot


def _per_slot(table: Table, *, slots: Codes, num_units: int) -> Floats:
    """Values of a [stage, unit] table, which may be a broadcast view, at some slots."""
    return table[slots // num_units, slots % num_units]


def _gradient_events(
    schedule: Schedule,
    *,
    program: EncodedProgram,
    start_s: Floats,
    finish_s: Floats,
    costs: Costs,
) -> _Events:
    """dK/dV of a (stage, sequence): all of it from the first B to the last."""
    which = program.codes == encoding.B
    slots: Codes = program.slots[which]
    offsets = np.array(schedule.unit_offsets())
    sequence = np.searchsorted(offsets, slots % schedule.num_units, side="right") - 1
    group = (slots // schedule.num_units) * len(offsets) + sequence
    groups, inverse = np.unique(group, return_inverse=True)
    begin = np.full(groups.shape, np.inf)
    end = np.zeros(groups.shape)
    total = np.zeros(groups.shape)
    np.minimum.at(begin, inverse, start_s[which])
    np.maximum.at(end, inverse, finish_s[which])
    size = _per_slot(costs.kv_gradient_bytes, slots=slots, num_units=schedule.num_units)
    np.add.at(total, inverse, size / program.num_shards[which])
    return _concatenate((begin, total), (end, -total))


def _concatenate(*events: _Events) -> _Events:
    times = np.concatenate([times for times, _ in events])
    changes = np.concatenate([changes for _, changes in events])
    return times, changes


def _track(events: _Events) -> MemoryTrack:
    """The running sum of changes, one value per moment.

    What is released and what is taken at the same moment never add up: the release comes first.
    """
    times, changes = events
    order = np.argsort(times, kind="stable")
    times, values = times[order], np.cumsum(changes[order])
    last = np.ones(times.shape, dtype=bool)
    # Sums of the same durations in another order differ in their last digits.
    last[:-1] = np.diff(times) > _SAME_MOMENT * times[-1:]
    # Rounding leaves crumbs behind when everything is released.
    return MemoryTrack(times[last], np.maximum(values[last], 0.0))
