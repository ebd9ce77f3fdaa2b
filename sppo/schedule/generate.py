"""Generator of schedules by name: the program of compute of every rank, and one REDUCE per stage.

:mod:`sppo.schedule.orders` has the order of each rank, and :mod:`sppo.schedule.multiplexing` cuts
units over ranks. Copies and messages are placed by later passes (:mod:`sppo.schedule.transfers`),
which see the whole schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sppo.schedule.actions import Action, ActionKind, Placement
from sppo.schedule.costs import Costs
from sppo.schedule.multiplexing.multiplex import multiplex
from sppo.schedule.orders.rank_orders import ForwardsBeforeBackward, rank_orders
from sppo.schedule.orders.steps import Step
from sppo.schedule.schedule import Schedule
from sppo.schedule.transfers.reductions import with_reductions

_KINDS = {"F": ActionKind.F, "B": ActionKind.B, "W": ActionKind.W}


def generate(
    name: str,
    *,
    num_ranks: int,
    lengths: Sequence[Sequence[int]],
    num_virtual: int = 1,
    warmup_per_hop: int = 1,
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
        warmup_per_hop: Extra warm-up forwards per rank towards the front: 1 is Seq1F1B; 2 hides
            message latency at the price of one more unit in flight per rank. Only without
            interleaving.
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
    orders = rank_orders(
        name,
        num_ranks=num_ranks,
        lengths=cut,
        num_virtual=num_virtual,
        warmup_per_hop=warmup_per_hop,
        forward_only=forward_only,
        forwards_before_backward=forwards_before_backward,
    )
    placement = Placement(num_ranks=num_ranks, num_virtual=num_virtual)
    programs = [
        _program(order, stages=placement.stages_of(rank)) for rank, order in enumerate(orders)
    ]
    whole = Schedule(name, placement, cut, tuple(programs))
    if name == "sppo_msp":
        return multiplex(whole, forward_only=forward_only, costs=costs)
    return whole


def _program(order: Iterable[tuple[str, Step]], *, stages: Sequence[int]) -> tuple[Action, ...]:
    """Return the actions of one rank from its order of steps, with a REDUCE where a stage ends."""
    actions = [
        Action(_KINDS[kind], stages[virtual], unit[0], unit[1]) for kind, (virtual, unit) in order
    ]
    return tuple(with_reductions(actions, stages=stages))
