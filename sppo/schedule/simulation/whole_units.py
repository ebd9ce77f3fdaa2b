"""Fast simulation of a step in which every unit runs whole on the rank of its stage.

The times of such a program follow from the order of each rank's compute, so the simulation needs
no actions for messages and copies and no checks. It is ten times as fast as
:func:`sppo.schedule.simulation.simulate.simulate` on the program of the same step, with the same
result. :mod:`sppo.schedule.simulation.dependencies` lists the dependencies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sppo.schedule.costs import Costs, Link, Table
from sppo.schedule.encoding import B, F, W
from sppo.schedule.orders.rank_orders import ForwardsBeforeBackward, RankOrder, rank_orders
from sppo.schedule.simulation.clock import DeadlockError
from sppo.schedule.simulation.lockstep import Compute, LockstepRanks, runs_in_lockstep
from sppo.schedule.simulation.simulated_step import SimulatedStep

_CODES = {"F": F, "B": B, "W": W}
_UNKNOWN = -1.0


def simulate_whole_units(
    name: str,
    *,
    num_ranks: int,
    lengths: Sequence[Sequence[int]],
    costs: Costs,
    num_virtual: int = 1,
    forwards_before_backward: ForwardsBeforeBackward = (),
) -> SimulatedStep:
    """Simulate a step of the schedule `name`.

    Args:
        name: Name of a schedule that cuts no unit over ranks, one of `schedule_names()`.
        num_ranks: Pipeline ranks.
        lengths: Tokens of every subsequence of every sequence.
        costs: Costs of the same stages and units, with copies that flow layer by layer.
        num_virtual: Stages per rank.
        forwards_before_backward: Forwards that ranks have begun before backwards, see
            `generate`.

    Raises:
        ValueError: A request that the schedule cannot serve.
        DeadlockError: Ranks that would wait for each other.
    """
    times = _played(
        name,
        num_ranks=num_ranks,
        lengths=lengths,
        costs=costs,
        num_virtual=num_virtual,
        forwards_before_backward=forwards_before_backward,
    )
    step_s = max(times.last_s)
    idle = [
        [bubble_s + step_s - free_s, message_s, copy_s]
        for free_s, bubble_s, message_s, copy_s in zip(*times.clocks, strict=True)
    ]
    offsets, stages = _offsets(lengths), np.arange(costs.num_stages).reshape(-1, num_ranks).T
    held = [
        _held_bytes(times.orders[alike.start], stages[alike], costs=costs, offsets=offsets)
        for alike in _ranks_of_one_order(times.orders)
    ]
    return SimulatedStep(step_s, np.array(idle), np.concatenate(held))


def whole_unit_ends(
    name: str,
    *,
    num_ranks: int,
    lengths: Sequence[Sequence[int]],
    costs: Costs,
    num_virtual: int = 1,
    forwards_before_backward: ForwardsBeforeBackward = (),
) -> list[list[float]]:
    """Return when the compute actions of each rank end, in seconds, in the order of its program.

    Takes the arguments of :func:`simulate_whole_units`, and raises its errors.
    """
    return _played(
        name,
        num_ranks=num_ranks,
        lengths=lengths,
        costs=costs,
        num_virtual=num_virtual,
        forwards_before_backward=forwards_before_backward,
    ).ends_s


def runs_whole_units(name: str, *, costs: Costs) -> bool:
    """Return whether a step of a schedule can be simulated by this module.

    It cannot if units are cut (MSP), if copies do not flow layer by layer, or if K and V are
    recomputed, or copied, or weights or gradients are copied.
    """
    return name != "sppo_msp" and bool(costs.layer_copies) and not costs.copies_stages


class _Times(NamedTuple):
    """Times of all ranks after a step.

    Attributes:
        orders: Compute of each rank.
        ends_s: Ends of the compute of each rank.
        last_s: End of the last action of each rank.
        clocks: End of the last compute of each rank, and its waits for results of other ranks, for
            messages and for copies.
    """

    orders: list[Compute]
    ends_s: list[list[float]]
    last_s: list[float]
    clocks: list[list[float]]


def _played(
    name: str,
    *,
    num_ranks: int,
    lengths: Sequence[Sequence[int]],
    costs: Costs,
    num_virtual: int,
    forwards_before_backward: ForwardsBeforeBackward,
) -> _Times:
    """Return the times of a step, see :func:`simulate_whole_units`."""
    assert runs_whole_units(name, costs=costs), "this step is simulated by schedule.simulate"
    offsets = _offsets(lengths).tolist()
    orders: list[Compute] = []
    before = None
    for order in rank_orders(
        name,
        num_ranks=num_ranks,
        lengths=lengths,
        num_virtual=num_virtual,
        forwards_before_backward=forwards_before_backward,
    ):
        orders.append(orders[-1] if order == before else _compute(order, offsets))
        before = order
    if len(set(map(id, orders))) == 1 and runs_in_lockstep(orders[0], num_ranks=num_ranks):
        return _played_at_once(orders, costs=costs)
    return _played_by_rank(orders, costs=costs)


def _played_at_once(orders: list[Compute], *, costs: Costs) -> _Times:
    """Return the times of a step whose ranks all have the same order."""
    ranks = LockstepRanks(orders[0], num_ranks=len(orders), costs=costs)
    clocks = [ranks.free_s, ranks.bubble_s, ranks.message_s, ranks.copy_s]
    return _Times(
        orders, ranks.ends_s.tolist(), ranks.last_s.tolist(), [clock.tolist() for clock in clocks]
    )


def _played_by_rank(orders: list[Compute], *, costs: Costs) -> _Times:
    """Return the times of a step, played rank by rank."""
    num_ranks = len(orders)
    inbox = [_Inbox(costs.num_units) for _ in range(costs.num_stages)]
    ranks = [
        _Rank(range(rank, costs.num_stages, num_ranks), order, costs=costs, inbox=inbox)
        for rank, order in enumerate(orders)
    ]
    _play(ranks)
    clocks = [[rank.free_s, rank.bubble_s, rank.message_s, rank.copy_s] for rank in ranks]
    return _Times(
        orders,
        [rank.ends_s for rank in ranks],
        [rank.last_s for rank in ranks],
        [*map(list, zip(*clocks, strict=True))],
    )


def _offsets(lengths: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """Return the index of each sequence's first unit, units numbered over all sequences."""
    return np.cumsum([0, *map(len, lengths)], dtype=np.int64)[:-1]


class _Inbox:
    """Times at which the inputs of each unit of one stage were computed and arrived."""

    def __init__(self, num_units: int) -> None:
        self.activation_made_s = [_UNKNOWN] * num_units
        self.activation_arrived_s = [_UNKNOWN] * num_units
        self.gradient_made_s = [_UNKNOWN] * num_units
        self.gradient_arrived_s = [_UNKNOWN] * num_units


class _VirtualStage:
    """Stage of a rank: costs of its units, sources of inputs, and targets of results."""

    def __init__(self, stage: int, *, costs: Costs, defers: bool, inbox: Sequence[_Inbox]) -> None:
        self.inbox = inbox[stage]
        self.below = inbox[stage - 1] if stage else None
        self.above = inbox[stage + 1] if stage + 1 < len(inbox) else None
        self.activations, self.gradients = (
            self.inbox.activation_arrived_s,
            self.inbox.gradient_arrived_s,
        )
        if self.below is None:
            self.activations = [0.0] * costs.num_units
        if self.above is None:
            self.gradients = [0.0] * costs.num_units
        self.forward_s: list[float] = costs.forward_s[stage].tolist()
        self.weight_s: list[float] = costs.weight_s[stage].tolist()
        backward = costs.backward_s[stage]
        if not defers:
            backward = backward + costs.weight_s[stage]
        self.backward_s: list[float] = backward.tolist()
        self.reduce_s = float(costs.reduce_s[stage])
        offloaded = costs.offload_bytes[stage]
        self.out_s: list[float] = (offloaded / costs.copies.d2h_bytes_per_s).tolist()
        self.back_s: list[float] = (offloaded / costs.copies.h2d_bytes_per_s).tolist()
        self.leaves: list[bool] = (offloaded > 0).tolist()
        self.gone_s = [0.0] * costs.num_units
        self.flow = costs.layer_copies[stage]
        self.left = (1 + defers) * costs.num_units
        """Number of B and W still to run; after the last one the stage's gradients are reduced."""


class _Rank:
    """Clock of one rank; `run` yields while it waits for a result of a neighbour."""

    def __init__(
        self, stages: range, order: Compute, *, costs: Costs, inbox: Sequence[_Inbox]
    ) -> None:
        self.stages, self.order = stages, order
        self.virtual_stages = [
            _VirtualStage(stage, costs=costs, defers=W in order.codes, inbox=inbox)
            for stage in stages
        ]
        self.free_s = self._last_return_s = 0.0
        self.ends_s: list[float] = []
        self.bubble_s = self.message_s = self.copy_s = 0.0
        rank, num_ranks = stages.start, stages.step
        self._wires = {
            other: _Wire(costs.links.link(rank, receiver=other), costs=costs)
            for other in {(rank + 1) % num_ranks, (rank - 1) % num_ranks} - {rank}
        }
        self._down = self._wires.get((rank + 1) % num_ranks)
        self._up = self._wires.get((rank - 1) % num_ranks)
        self._leaving_s = self._returning_s = self._block_out_s = 0.0
        self._before_s = self._layer_s = 0.0
        self._reducing_s = 0.0
        """Seconds of the reduction after the last action."""

    @property
    def last_s(self) -> float:
        """End of the rank's last action."""
        reduced_s = self.free_s + self._reducing_s
        arrived = max((wire.last_s for wire in self._wires.values()), default=0.0)
        return max(reduced_s, arrived, self._leaving_s, self._last_return_s)

    def run(self) -> Iterator[tuple[int, int, int]]:
        """Walk the order of the rank to its end; yield the (code, stage, unit) that must wait."""
        # Memory for a unit that comes back is free at the end of the compute before the preceding
        # backward, that is when the preceding backward may begin.
        begun_s = room_s = 0.0
        first_backward = True
        for code, place, unit in zip(*self.order, strict=True):
            stage = self.virtual_stages[place]
            if self._reducing_s:
                self.free_s += self._reducing_s
                self.message_s += self._reducing_s
                self._reducing_s = 0.0
            begun_before_s, begun_s = begun_s, self.free_s
            if code == F:
                while stage.activations[unit] < 0:
                    yield code, place, unit
                self._forward(stage, unit, stage.activations[unit])
                self.ends_s.append(self.free_s)
                continue
            if code == B:
                while stage.gradients[unit] < 0:
                    yield code, place, unit
                permitted_s = begun_before_s if first_backward else room_s
                self._backward(stage, unit, stage.gradients[unit], permitted_s)
                first_backward, room_s = False, begun_s
            else:
                self.free_s += stage.weight_s[unit]
            self.ends_s.append(self.free_s)
            stage.left -= 1
            if not stage.left:
                self._reducing_s = stage.reduce_s

    def _forward(self, stage: _VirtualStage, unit: int, arrived: float) -> None:
        """Run a forward, send its result, and start the copy of its offloaded blocks."""
        seconds, leaves, free = stage.forward_s[unit], stage.leaves[unit], self.free_s
        start = arrived if arrived > free else free
        if leaves:
            room_s = stage.flow.forward_start_s(
                start,
                seconds=seconds,
                copy_s=stage.out_s[unit],
                free_s=self._leaving_s,
                block_before_s=self._block_out_s,
            )
            if room_s > start:
                start = room_s
        if start > free:
            self._wait(start, stage.inbox.activation_made_s[unit], arrived)
        self.free_s = finish = start + seconds
        if stage.above is not None:
            stage.above.activation_made_s[unit] = finish
            sent = finish if self._down is None else self._down.send(unit, ready=finish)
            stage.above.activation_arrived_s[unit] = sent
        if leaves:
            copy_s, layers = stage.out_s[unit], stage.flow.layers
            self._block_out_s = copy_s / layers
            begin = max(self._leaving_s, finish - seconds * (layers - 1) / layers)
            self._leaving_s = max(begin + copy_s, finish + self._block_out_s)
            stage.gone_s[unit] = self._leaving_s

    def _backward(self, stage: _VirtualStage, unit: int, arrived: float, room_s: float) -> None:
        """Run a backward and the copy back of its unit, which has memory from `room_s` on."""
        seconds, free, flow = stage.backward_s[unit], self.free_s, stage.flow
        layer_s = seconds / flow.layers
        start = arrived if arrived > free else free
        if stage.leaves[unit]:
            permitted, copy_s = max(stage.gone_s[unit], room_s), stage.back_s[unit]
            first = max(permitted, self._returning_s, self._before_s - flow.back * self._layer_s)
            start, last = flow.backward_start_s(
                max(start, permitted), first=first, layer_s=layer_s, copy_s=copy_s
            )
            self._returning_s = first + copy_s
            self._last_return_s = max(self._last_return_s, last)
        if start > free:
            self._wait(start, stage.inbox.gradient_made_s[unit], arrived)
        self.free_s = self._before_s = finish = start + seconds
        self._layer_s = layer_s
        if stage.below is not None:
            stage.below.gradient_made_s[unit] = finish
            sent = finish if self._up is None else self._up.send(unit, ready=finish)
            stage.below.gradient_arrived_s[unit] = sent

    def _wait(self, start: float, made: float, arrived: float) -> None:
        """Record the causes of the wait before compute that begins at `start`."""
        computed = max(self.free_s, made)
        delivered = max(computed, arrived)
        self.bubble_s += computed - self.free_s
        self.message_s += delivered - computed
        self.copy_s += start - delivered


class _Wire:
    """One direction of the link between two neighbours, which carries messages one at a time."""

    def __init__(self, link: Link, *, costs: Costs) -> None:
        self.seconds: list[float] = (costs.message_bytes / link.bytes_per_s).tolist()
        self.latency_s = link.latency_s
        self.free_s = self.last_s = 0.0

    def send(self, unit: int, *, ready: float) -> float:
        """Send the message of a unit that is ready at `ready`; return its arrival."""
        begin = ready if ready > self.free_s else self.free_s
        self.free_s = begin + self.seconds[unit]
        self.last_s = self.free_s + self.latency_s
        return self.last_s


def _compute(order: RankOrder, offsets: list[int]) -> Compute:
    return Compute(
        [_CODES[kind] for kind, _ in order],
        [virtual for _, (virtual, _) in order],
        [offsets[sequence] + subsequence for _, (_, (sequence, subsequence)) in order],
    )


def _play(ranks: Sequence[_Rank]) -> None:
    """Resume rank after rank, down the pipeline and up again, until all have ended.

    Raises:
        DeadlockError: Ranks that wait for each other.
    """
    walks = [rank.run() for rank in ranks]
    waiting: dict[int, tuple[int, int, int]] = {}
    going = list(range(len(walks)))
    while going:
        before, waiting = waiting, {}
        for place in reversed(going):
            waits = next(walks[place], None)
            if waits is not None:
                waiting[place] = waits
        going = list(waiting)
        if waiting and waiting == before:
            rank = min(waiting)
            raise DeadlockError(
                f"rank {rank} and {len(waiting) - 1} others wait for each other: the order of "
                "their programs contradicts itself",
                rank=rank,
                index=[*zip(*ranks[rank].order, strict=True)].index(waiting[rank]),
            )


def _ranks_of_one_order(orders: Sequence[Compute]) -> Iterator[slice]:
    """Yield the runs of neighbouring ranks that have the same order."""
    for _, ranks in groupby(range(len(orders)), key=lambda rank: id(orders[rank])):
        own = [*ranks]
        yield slice(own[0], own[-1] + 1)


def _held_bytes(
    order: Compute,
    stages: npt.NDArray[np.int64],
    *,
    costs: Costs,
    offsets: npt.NDArray[np.int64],
) -> Table:
    """Return the peak bytes that units hold, from the order of compute alone, [ranks].

    Args:
        order: Order of the compute of all ranks.
        stages: Stages of each rank, [ranks, virtual stages].
        costs: Costs of all stages and units.
        offsets: Index of the first unit of each sequence.
    """
    codes, virtual, units = (np.array(column) for column in order)
    counts = np.diff(np.append(offsets, costs.num_units))
    is_first, is_last = np.zeros((2, costs.num_units), dtype=bool)
    is_first[offsets] = is_last[offsets + counts - 1] = True

    def of_sequences(sizes: Table) -> Table:
        whole: Table = np.repeat(np.add.reduceat(sizes, offsets, axis=-1), counts, axis=-1)
        return whole

    def at_actions(sizes: Table) -> Table:
        """Return the sizes of the units of all actions, [ranks, actions]."""
        found: Table = sizes[:, virtual, units]
        return found

    kv, gradients = (
        of_sequences(table[stages]) for table in (costs.kv_bytes, costs.kv_gradient_bytes)
    )
    kept = costs.activation_bytes[stages] - costs.offload_bytes[stages]
    operands = at_actions(costs.operand_bytes[stages] * bool((codes == W).any()))
    taken = np.select(
        [codes == F, codes == B],
        [at_actions(kept + is_first * kv), at_actions(is_last * gradients)],
        0.0,
    )
    released = np.select(
        [codes == B, codes == W],
        [at_actions(kept + is_first * (kv + gradients)), operands],
        0.0,
    )
    # Operands of a weight half are allocated when its backward frees the saved activations.
    change = taken - released + np.where(codes == B, operands, 0.0)
    after = np.cumsum(change, axis=1)
    held = np.maximum(after, after - change + taken)
    most: Table = held.max(axis=1, initial=0.0)
    return most
