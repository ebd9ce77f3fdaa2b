"""Messages between stages that a step needs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sppo.schedule.encoding import SEND_ACT
from sppo.schedule.schedule import Schedule


def needed_messages(schedule: Schedule, *, code: int) -> npt.NDArray[np.int64]:
    """Return the messages of one wire, whether the programs hold the actions or not.

    Args:
        schedule: Schedule of the step.
        code: Opcode of the wire's SEND.

    Returns:
        Rows (producing slot, index of the message, messages of the slot, sender, receiver),
        ascending.
    """
    units, size = schedule.num_units, schedule.num_stages * schedule.num_units
    slots = np.arange(size)
    consumers = slots + (units if code == SEND_ACT else -units)
    sender, receiver = slots // units % schedule.num_ranks, consumers // units % schedule.num_ranks
    cut = {slot: routes for (wire, slot), routes in schedule.msp_routes.items() if wire == code}
    plain = (consumers >= 0) & (consumers < size) & (sender != receiver)
    plain &= ~np.isin(slots, [*cut])
    rows = np.stack([slots, np.zeros_like(slots), np.ones_like(slots), sender, receiver], axis=1)
    extra = [
        (slot, index, len(routes), route.sender, route.receiver)
        for slot, routes in cut.items()
        for index, route in enumerate(routes)
        if route.sender != route.receiver
    ]
    needed = np.concatenate([rows[plain], np.array(extra, dtype=np.int64).reshape(-1, 5)])
    ordered: npt.NDArray[np.int64] = needed[np.lexsort((needed[:, 1], needed[:, 0]))]
    return ordered
