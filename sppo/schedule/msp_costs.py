"""Seconds of units that are cut into shards (MSP), including the transfers between their ranks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sppo.schedule.actions import Lengths, Op
from sppo.schedule.costs import Costs, Table
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
    complete gradients back. A broadcast and a sum are pipelined and cost their bytes once.
    Collectives of the owner's devices (ZeRO-2) take as long as for a whole unit.
    """
    seconds: dict[tuple[int, int], float] = {}
    starts = np.concatenate([np.cumsum((0, *parts))[:-1] for parts in schedule.lengths])
    before_kv_bytes, before_gradient_bytes = (
        _before_units(table, lengths=schedule.lengths)
        for table in (costs.kv_bytes, costs.kv_gradient_bytes)
    )
    for slot, group in groups.items():
        stage, unit = divmod(slot, costs.num_units)
        owner = schedule.placement.rank_of(stage)
        links = [costs.links.link(owner, receiver=r) for r in group.ranks if r != owner]
        latency_s = max((link.latency_s for link in links), default=0.0)
        bytes_per_s = min((link.bytes_per_s for link in links), default=float("inf"))
        share = _largest_share(
            group, start=int(starts[unit]), context_slope=costs.context_slope, schedule=schedule
        )
        before_kv = float(before_kv_bytes[stage, unit])
        before_gradients = float(before_gradient_bytes[stage, unit])
        own_kv = float(costs.kv_bytes[stage, unit])
        weights = float(costs.weight_bytes[stage])
        stream = weights + before_kv
        forward = float(costs.forward_s[stage, unit]) * share
        collectives = costs.unit_collectives_s[stage] if costs.unit_collectives_s else (0.0, 0.0)
        streamed_s = latency_s + stream / bytes_per_s
        seconds[Op.F, slot] = (
            max(forward, streamed_s, collectives[0]) + latency_s + own_kv / bytes_per_s
        )
        own_gradients = float(costs.kv_gradient_bytes[stage, unit])
        waited = before_kv + own_kv + before_gradients + own_gradients + own_kv
        backward = float(costs.backward_s[stage, unit] + costs.weight_s[stage, unit]) * share
        behind = max(weights, float(costs.weight_gradient_bytes[stage]))
        sent_s = latency_s + behind / bytes_per_s
        seconds[Op.B, slot] = (
            max(backward, sent_s, collectives[1]) + latency_s + waited / bytes_per_s
        )
    return seconds


def _largest_share(
    group: MspGroup, *, start: int, context_slope: float, schedule: Schedule
) -> float:
    """Return the fraction of the unit's compute in the MSP group's slowest shard."""
    if not schedule.cuts:
        # Equal shards by definition; abstract schedules count one token per rank or fewer.
        return 1 / len(group.ranks)
    ends = np.cumsum((0, *group.lengths))
    compute = (1 + context_slope * start) * ends + context_slope * ends**2 / 2
    return float(np.diff(compute).max() / compute[-1])


def _before_units(table: Table, *, lengths: Lengths) -> Table:
    """Return the sum over the subsequences before each unit of its sequence, for every stage."""
    ends = np.cumsum([len(parts) for parts in lengths])[:-1]
    before = (np.pad(part[:, :-1], ((0, 0), (1, 0))) for part in np.split(table, ends, axis=1))
    return np.concatenate([np.cumsum(part, axis=1) for part in before], axis=1)
