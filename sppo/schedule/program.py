"""Construction of a step's program: compute, messages, copies and reductions of every rank.

`step_program` makes the program for all users: solver, simulator, plots, executor and the
comparison after a run hold the same object, whose `digest()` is stored in the plan. The function
is pure and its arguments come from a plan, never from measurements of a rank, so every rank makes
the same program.

Gathers of sharded weights (ZeRO-3) are not actions. They belong to the F and B that read the
weights, which fetch the weights layer by layer, one layer ahead of the compute, and their time is
part of the costs of F and B. Reductions of sharded gradients (ZeRO-2 and 3) are not actions
either: they belong to the F (of the head), B and W that form the gradients, and overlap the
compute of the next layer. The last REDUCE of a rank waits for the last of these reductions, and so
do copies of a stage's gradients off the device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sppo.schedule.checks.validate import check_deadlock_free, validate
from sppo.schedule.costs import CopyEngines, Costs, abstract_costs, with_offload
from sppo.schedule.encoding import F
from sppo.schedule.generate import generate
from sppo.schedule.orders.rank_orders import ForwardsBeforeBackward
from sppo.schedule.schedule import Schedule
from sppo.schedule.transfers.communication import place_messages
from sppo.schedule.transfers.copies import place_copies
from sppo.schedule.transfers.kv_placement import place_kv
from sppo.schedule.transfers.state_streaming import place_state


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Schedule and its costs: the input of a simulation."""

    schedule: Schedule
    costs: Costs


def step_program(
    name: str,
    *,
    num_ranks: int,
    lengths: Sequence[Sequence[int]],
    costs: Costs,
    num_virtual: int = 1,
    forward_only: bool = False,
    forwards_before_backward: ForwardsBeforeBackward = (),
    messages: bool = True,
) -> Schedule:
    """Make the program of a step, and check it unless messages are left out.

    Args:
        name: Name of the schedule, one of `schedule_names()`.
        num_ranks: Pipeline ranks.
        lengths: Tokens of every subsequence of every sequence.
        costs: Costs of the actions. Units with `offload_bytes` above 0 get copies, and so do K and
            V with `kv_offload_bytes`, weights with `streamed_weight_bytes` and gradients with
            `streamed_gradient_bytes`; K and V with `kv_recompute_s` are recomputed. The times
            decide the order of messages and which units a schedule cuts.
        num_virtual: Stages per rank.
        forward_only: Leave out backwards, copies and reductions (evaluation).
        forwards_before_backward: Forwards that ranks have begun before backwards, see
            `generate`.
        messages: Place messages, and check the program. A program without messages, for which a
            simulation sends each tensor as soon as it exists, takes a third of the time to make.

    Raises:
        ValueError: A request that the schedule cannot serve.
        ScheduleError: The schedule breaks a rule.
        DeadlockError: The messages of the schedule would wait for each other.
    """
    schedule = generate(
        name,
        num_ranks=num_ranks,
        num_virtual=num_virtual,
        lengths=lengths,
        forward_only=forward_only,
        forwards_before_backward=forwards_before_backward,
        costs=costs,
    )
    if forward_only:
        nothing = np.zeros_like(costs.offload_bytes)
        costs = replace(
            costs, offload_bytes=nothing, kv_offload_bytes=nothing, kv_recompute_s=nothing
        )
    if not messages:
        return _with_copies(schedule, costs=costs)
    return lower(schedule, costs=costs)


def lower(schedule: Schedule, *, costs: Costs) -> Schedule:
    """Return `schedule` with its copies and messages, checked.

    Args:
        schedule: Schedule of compute actions only.
        costs: Costs of the actions. Units with `offload_bytes` above 0 get copies, and so do K and
            V with `kv_offload_bytes`, weights with `streamed_weight_bytes` and gradients with
            `streamed_gradient_bytes`; K and V with `kv_recompute_s` are recomputed. The times
            decide the order of messages.

    Raises:
        ScheduleError: The schedule breaks a rule.
        DeadlockError: The messages of the schedule would wait for each other.
    """
    return with_messages(_with_copies(schedule, costs=costs), costs=costs)


def with_messages(schedule: Schedule, *, costs: Costs) -> Schedule:
    """Return `schedule`, which already has its copies, with its messages, checked.

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


def _with_copies(schedule: Schedule, *, costs: Costs) -> Schedule:
    """Return `schedule` with the copies and recomputations that `costs` ask for.

    Raises:
        ValueError: K and V, weights or gradients of units that ranks share would leave the device.
    """
    offloaded, recomputed = (
        frozenset(np.nonzero(table)[0].tolist())
        for table in (costs.kv_offload_bytes, costs.kv_recompute_s)
    )
    weights, gradients = (
        bool(table.any()) for table in (costs.streamed_weight_bytes, costs.streamed_gradient_bytes)
    )
    shared = {*schedule.actions.stages[schedule.actions.widths > 1].tolist()}
    if shared & (offloaded | recomputed) or (shared and (weights or gradients)):
        raise ValueError(
            "ranks that share units (multiplexed sequence partitioning) have their K and V, "
            "weights and gradients on the device: write activations.kv=retain, "
            "state.weights=device and state.gradients=device, or parallel.multiplexed=off"
        )
    schedule = place_copies(schedule, offloaded=costs.offload_bytes > 0)
    schedule = place_kv(schedule, offloaded=offloaded, recomputed=recomputed)
    return place_state(schedule, weights=weights, gradients=gradients)


def equal_costs(
    *,
    offloaded: npt.NDArray[np.bool_],
    kv_offloaded: Collection[int] = (),
    kv_recomputed: Collection[int] = (),
    streams_weights: bool = False,
    streams_gradients: bool = False,
) -> Costs:
    """Return costs of equal units, with free messages and copies, for a step without a plan.

    Args:
        offloaded: Whether a unit leaves the device, [num_stages, num_units].
        kv_offloaded: Stages whose K and V are offloaded between forward and backward.
        kv_recomputed: Stages that recompute K and V before their backward.
        streams_weights: Whether weights live in another tier between their uses.
        streams_gradients: Whether gradients live in another tier between their uses.
    """
    stages, units = offloaded.shape
    costs = abstract_costs(stages, num_units=units, backward_s=1.0, weight_s=1.0)
    leaves, recomputed = np.zeros((2, stages, units))
    leaves[list(kv_offloaded)] = 1.0
    recomputed[list(kv_recomputed)] = 1.0
    costs = with_offload(costs, ratios=offloaded.astype(np.float64), copies=CopyEngines())
    return replace(
        costs,
        kv_bytes=np.ones((stages, units)),
        kv_offload_bytes=leaves,
        kv_recompute_s=recomputed,
        streamed_weight_bytes=np.full(stages, float(streams_weights)),
        streamed_gradient_bytes=np.full(stages, float(streams_gradients)),
    )


def forward_part(schedule: Schedule) -> Schedule:
    """Return only the forwards of `schedule`, in their order: the program of an evaluation."""
    forwards = (program.take(program.codes == F) for program in schedule.encoded)
    return replace(schedule, encoded=tuple(forwards))
