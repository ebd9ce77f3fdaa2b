"""Messages between stages that a step needs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sppo.schedule.encoding import SEND_ACT
from sppo.schedule.graph import Flags, Floats, Ints
from sppo.schedule.schedule import Schedule


class Messages(NamedTuple):
    """Messages of one wire, one entry each."""

    slots: Ints
    """Slots of the units on the stages that make the tensors."""
    numbers: Ints
    """Numbers of the messages among those of their slots."""
    counts: Ints
    """Numbers of messages of the slots, those within a rank included."""
    senders: Ints
    receivers: Ints
    shards: Ints
    """Shards of the units that make the tensors."""
    shares: Floats
    """Fractions of the units' tokens that the messages carry."""

    def where(self, chosen: Flags | Ints) -> Messages:
        """Return the messages that flags choose, or those at some places."""
        return Messages._make(column[chosen] for column in self)


def needed_messages(schedule: Schedule, *, code: int) -> Messages:
    """Return the messages of one wire, whether the programs hold the actions or not.

    Args:
        schedule: Schedule of the step.
        code: Opcode of the wire's SEND.
    """
    units, size = schedule.num_units, schedule.num_stages * schedule.num_units
    slots = np.arange(size)
    consumers = slots + (units if code == SEND_ACT else -units)
    senders, receivers = (own // units % schedule.num_ranks for own in (slots, consumers))
    groups = schedule.msp_groups
    cut = {slot: routes for (wire, slot), routes in schedule.msp_routes.items() if wire == code}
    crosses = (consumers >= 0) & (consumers < size) & (senders != receivers)
    crosses[[*cut]] = False
    whole, zeros = np.flatnonzero(crosses), np.zeros(np.count_nonzero(crosses), dtype=np.int64)
    sent = [
        (slot, number, route)
        for slot, routes in cut.items()
        for number, route in enumerate(routes)
        if route.sender != route.receiver
    ]
    of_cut = [
        [slot for slot, _, _ in sent],
        [number for _, number, _ in sent],
        [len(cut[slot]) for slot, _, _ in sent],
        [route.sender for _, _, route in sent],
        [route.receiver for _, _, route in sent],
        [groups[s].ranks.index(route.sender) if s in groups else 0 for s, _, route in sent],
    ]
    of_whole = [whole, zeros, zeros + 1, senders[whole], receivers[whole], zeros]
    names = (
        np.append(own, np.array(more, dtype=np.int64))
        for own, more in zip(of_whole, of_cut, strict=True)
    )
    shares = np.append(np.ones(whole.size), [route.share for _, _, route in sent])
    return Messages._make([*names, shares])
