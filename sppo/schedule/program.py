"""Construction of a step's program: compute, messages, copies and reductions of every rank.

`lower(generate(...))` makes the program for all users: solver, simulator, plots, executor and the
comparison after a run hold the same object, whose `digest()` is stored in the plan. Both functions
are pure and their arguments come from a plan, never from measurements of a rank, so every rank
makes the same program.

Gathers of sharded weights (ZeRO-3) are not actions. They belong to the F and B that read the
weights, which fetch the weights layer by layer, one layer ahead of the compute, and their time is
part of the costs of F and B. Reductions of sharded gradients (ZeRO-2 and 3) are not actions
either: they belong to the F (of the head), B and W that form the gradients, and overlap the
compute of the next layer. The last REDUCE of a rank waits for the last of these reductions, and so
do copies of a stage's gradients off the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sppo.schedule.actions import Op, Placement
from sppo.schedule.checks import check_deadlock_free, validate
from sppo.schedule.costs import Costs, abstract_costs
from sppo.schedule.multiplexing.multiplex import multiplex
from sppo.schedule.orders.rank_orders import ForwardsBeforeBackward, encoded_orders
from sppo.schedule.schedule import Schedule, columns_of
from sppo.schedule.transfers.communication import place_messages, with_reductions
from sppo.schedule.transfers.copies import place_copies, place_state


def generate(
    name: str,
    *,
    num_ranks: int,
    lengths: Sequence[Sequence[int]],
    num_virtual: int = 1,
    forwards_before_backward: ForwardsBeforeBackward = (),
    forward_only_stages: int = 0,
    costs: Costs | None = None,
) -> Schedule:
    """Return the schedule `name`: the compute of every rank, and a REDUCE of each backward stage.

    Args:
        name: Name of the schedule, one of `schedule_names()`.
        num_ranks: Pipeline ranks (p).
        lengths: Tokens of every subsequence of every sequence. Sequences may differ in length and
            in number of subsequences.
        num_virtual: Stages per rank (v); more than 1 only for `WITH_VIRTUAL_STAGES`.
        forwards_before_backward: Number of forwards that each rank has begun before each of its
            backwards; empty for the schedule's own numbers.
        forward_only_stages: Number of first stages without a backward, because nothing trains in
            them or below them. Their forwards keep the order of the whole schedule.
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
        forwards_before_backward=forwards_before_backward,
    )
    units = sum(map(len, cut))
    virtual, unit = np.divmod(steps, units)
    ranks = np.broadcast_to(np.arange(num_ranks)[:, None], codes.shape)
    slots = (virtual * num_ranks + ranks) * units + unit
    columns = columns_of(ranks.ravel(), codes.ravel(), slots.ravel())
    if not 0 <= forward_only_stages < num_ranks * num_virtual:
        raise ValueError(
            f"forward_only_stages {forward_only_stages}: must be at least 0 and less than the "
            f"{num_ranks * num_virtual} stages, because the last stage has a backward"
        )
    if forward_only_stages:
        columns = columns[:, (columns[1] == Op.F) | (columns[2] >= forward_only_stages * units)]
    whole = with_reductions(Schedule(name, Placement(num_ranks, num_virtual), cut, columns))
    if name == "sppo_msp":
        return multiplex(whole, costs=costs)
    return whole


def lower(schedule: Schedule, *, costs: Costs) -> Schedule:
    """Return `schedule` with its copies and messages, checked.

    Args:
        schedule: Schedule of compute actions and reductions only.
        costs: Costs of the actions; the times decide the order of messages, and the rest says what
            is copied (:func:`with_copies`).

    Raises:
        ScheduleError: The schedule breaks a rule.
        DeadlockError: The messages of the schedule would wait for each other.
    """
    return with_messages(with_copies(schedule, costs=costs), costs=costs)


def with_messages(schedule: Schedule, *, costs: Costs) -> Schedule:
    """Return `schedule`, which already has its copies, with its messages, checked.

    A simulation of a program without messages sends each tensor as soon as it exists. To make that
    program takes a third of the time.

    Args:
        schedule: Schedule without messages.
        costs: Costs of the actions; their times decide the order of messages.

    Raises:
        ScheduleError: The schedule breaks a rule.
        DeadlockError: The messages of the schedule would wait for each other.
    """
    if schedule.num_ranks > 1:
        schedule = place_messages(schedule, costs=costs)
    validate(schedule)
    check_deadlock_free(schedule)
    return schedule


def with_copies(schedule: Schedule, *, costs: Costs) -> Schedule:
    """Return `schedule` with the copies and recomputations that `costs` ask for.

    Args:
        schedule: Schedule of compute actions and reductions only. Of stages without a backward,
            only weights are copied.
        costs: Costs of the actions. Units with `offload_bytes` above 0 get copies, and so do K and
            V with `kv_offload_bytes`, weights with `streamed_weight_bytes` and gradients with
            `streamed_gradient_bytes`; K and V with `kv_recompute_s` are recomputed.

    Raises:
        ValueError: K and V, weights or gradients of units that ranks share would leave the device.
    """
    weights, gradients = (
        bool(table.any()) for table in (costs.streamed_weight_bytes, costs.streamed_gradient_bytes)
    )
    offloaded, recomputed = (
        frozenset(np.nonzero(table)[0].tolist())
        for table in (costs.kv_offload_bytes, costs.kv_recompute_s)
    )
    shared = {*schedule.stages[schedule.widths > 1].tolist()}
    if shared & (offloaded | recomputed) or (shared and (weights or gradients)):
        raise ValueError(
            "ranks that share units (multiplexed sequence partitioning) have their K and V, "
            "weights and gradients on the device: write activations.kv=retain, "
            "state.weights=device and state.gradients=device, or parallel.multiplexed=off"
        )
    schedule = place_copies(
        schedule,
        offloaded=costs.offload_bytes > 0,
        kv_offloaded=offloaded,
        kv_recomputed=recomputed,
    )
    return place_state(schedule, weights=weights, gradients=gradients)


def forward_program(
    order: str,
    *,
    num_ranks: int,
    num_virtual: int,
    lengths: Sequence[Sequence[int]],
    streams_weights: bool,
) -> Schedule:
    """Return the program of an evaluation: the forwards of a step of units of equal cost.

    Args:
        order: Name of the schedule, one that cuts no units.
        num_ranks: Pipeline ranks.
        num_virtual: Stages per rank.
        lengths: Tokens of every subsequence of every sequence.
        streams_weights: Whether weights are copied to the device stage by stage.

    Raises:
        ValueError: The schedule cannot serve these sequences.
    """
    costs = abstract_costs(
        num_ranks * num_virtual,
        num_units=sum(map(len, lengths)),
        backward_s=1.0,
        weight_s=1.0,
    )
    whole = generate(
        order, num_ranks=num_ranks, num_virtual=num_virtual, lengths=lengths, costs=costs
    )
    forwards = place_state(forward_part(whole), weights=streams_weights, gradients=False)
    return with_messages(forwards, costs=costs)


def forward_part(schedule: Schedule) -> Schedule:
    """Return only the forwards of `schedule`, in their order."""
    return schedule.with_columns(schedule.columns[:, schedule.of(Op.F)])
