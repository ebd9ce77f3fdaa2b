"""Generator of schedules by name: the program of compute of every rank, and one REDUCE per stage.

:mod:`sppo.schedule.orders` has the order of each rank, and :mod:`sppo.schedule.multiplexing` cuts
units over ranks. Copies and messages are placed by later passes (:mod:`sppo.schedule.transfers`),
which see the whole schedule.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sppo.schedule.actions import Placement
from sppo.schedule.costs import Costs
from sppo.schedule.encoding import EncodedProgram
from sppo.schedule.multiplexing.multiplex import multiplex
from sppo.schedule.orders.rank_orders import ForwardsBeforeBackward, encoded_orders
from sppo.schedule.schedule import Schedule
from sppo.schedule.transfers.reductions import with_reductions


def generate(
    name: str,
    *,
    num_ranks: int,
    lengths: Sequence[Sequence[int]],
    num_virtual: int = 1,
    forward_only: bool = False,
    forwards_before_backward: ForwardsBeforeBackward = (),
    costs: Costs | None = None,
) -> Schedule:
    """Return the schedule `name`.

    Args:
        name: Name of the schedule, one of `schedule_names()`.
        num_ranks: Pipeline ranks (p).
        lengths: Tokens of every subsequence of every sequence. Sequences may differ in length and
            in number of subsequences.
        num_virtual: Stages per rank (v); more than 1 only for `WITH_VIRTUAL_STAGES`.
        forward_only: Leave out backwards and reductions (evaluation).
        forwards_before_backward: Number of forwards that each rank has begun before each of its
            backwards; empty for the schedule's own numbers.
        costs: Costs with which sppo_msp chooses the units to cut; equal units and free messages if
            not given.

    Raises:
        ValueError: An unknown name, or a request that the schedule cannot serve; the message says
            what to change.
    """
    cut = tuple(map(tuple, lengths))
    codes, steps = encoded_orders(
        name,
        num_ranks=num_ranks,
        lengths=cut,
        num_virtual=num_virtual,
        forward_only=forward_only,
        forwards_before_backward=forwards_before_backward,
    )
    placement = Placement(num_ranks=num_ranks, num_virtual=num_virtual)
    units = sum(map(len, cut))
    virtual, unit = np.divmod(steps, units)
    slots = (virtual * num_ranks + np.arange(num_ranks)[:, None]) * units + unit
    encoded = tuple(
        with_reductions(
            EncodedProgram.of_whole_units(codes[rank], slots[rank]),
            stages=placement.stages_of(rank),
            num_units=units,
        )
        for rank in range(num_ranks)
    )
    whole = Schedule(name, placement, cut, encoded)
    if name == "sppo_msp":
        return multiplex(whole, forward_only=forward_only, costs=costs)
    return whole
