"""Seconds of units that are cut into shards (MSP), including the transfers between their ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from sppo.schedule.actions import Lengths, Op
from sppo.schedule.costs import Costs, SeenKV, Table
from sppo.schedule.msp_groups import MspGroup
from sppo.schedule.schedule import Schedule


def msp_seconds(
    schedule: Schedule, *, groups: Mapping[int, MspGroup], costs: Costs
) -> dict[tuple[int, int], float]:
    """Return the seconds of every MSP group by (F or B, slot), including all transfers inside it.

    A borrower holds only the current layer of the owner's stage, so every unit transfers all
    weights again. While the shards compute, the owner broadcasts the weights of the next layer and,
    in forward, the K/V before the unit. The unit's own K/V is sent around the MSP group while every
    shard waits, so its time is added. In backward, weight gradients are sent to the owner at the
    same time, in the opposite direction of the weights. But a borrower has room for the K/V and
    their gradients of one layer only, so their transfers are waited for: all K/V up to the unit to
    the borrowers; the gradients of that K/V to the owner, which adds them up; and the unit's own
    complete gradients back. Of layers with a sliding window, K/V that the unit's queries see and
    their gradients are sent. A broadcast and a sum are pipelined and cost their bytes once.
    Collectives of the owner's devices (ZeRO-2) take as long as for a whole unit.
    """
    seconds: dict[tuple[int, int], float] = {}
    starts = np.concatenate([np.cumsum((0, *parts))[:-1] for parts in schedule.lengths])
    kv, passing = costs.kv_bytes, costs.passing_kv_bytes
    seen = costs.seen_kv or SeenKV(
        *(
            _up_to_units(table, lengths=schedule.lengths)
            for table in (kv, passing, costs.kv_gradient_bytes)
        )
    )
    for slot, group in groups.items():
        at = stage, unit = divmod(slot, costs.num_units)
        owner = schedule.placement.rank_of(stage)
        links = [costs.links.link(owner, receiver=rank) for rank in group.ranks if rank != owner]
        latency_s = max((link.latency_s for link in links), default=0.0)
        bytes_per_s = min((link.bytes_per_s for link in links), default=math.inf)
        # Equal shards by definition; abstract schedules count one token per rank or fewer.
        share = 1 / len(group.ranks)
        if schedule.cuts:
            ends = np.cumsum((0, *group.lengths))
            slope = costs.context_slope
            compute = (1 + slope * int(starts[unit])) * ends + slope * ends**2 / 2
            share = float(np.diff(compute).max() / compute[-1])
        weights, weight_gradients = costs.weight_bytes[stage], costs.weight_gradient_bytes[stage]
        backward_s = (costs.backward_s[at] + costs.weight_s[at]) * share
        own = kv[at] + passing[at]
        before = seen.kv_bytes[at] + seen.passing_kv_bytes[at] - own
        waited = seen.kv_bytes[at] + seen.gradient_bytes[at] + kv[at]
        collectives = costs.unit_collectives_s[stage] if costs.unit_collectives_s else (0.0, 0.0)
        for code, compute_s, streamed, collective_s, behind in (
            (
                Op.F,
                costs.forward_s[at] * share,
                weights + before,
                collectives[0],
                own,
            ),
            (Op.B, backward_s, max(weights, weight_gradients), collectives[1], waited),
        ):
            streamed_s = latency_s + streamed / bytes_per_s
            beside_s = max(compute_s, streamed_s, collective_s)
            seconds[code, slot] = float(beside_s + latency_s + behind / bytes_per_s)
    return seconds


def _up_to_units(table: Table, *, lengths: Lengths) -> Table:
    """Return the sum over the subsequences up to each unit of its sequence, for every stage."""
    ends = np.cumsum([len(parts) for parts in lengths])[:-1]
    return np.concatenate(
        [np.cumsum(part, axis=1) for part in np.split(table, ends, axis=1)], axis=1
    )
