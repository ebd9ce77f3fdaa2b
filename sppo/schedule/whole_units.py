"""Simulates a step in which every unit runs whole on the rank of its stage, one stage per rank.

What such a program does follows from the order of each rank's compute, so it is played without the
actions for messages and copies, and without a check: ten times as fast as
:func:`sppo.schedule.simulate.simulate` plays the program of the same step, with the same result.
:mod:`sppo.schedule.event_loop` says what waits for what.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sppo.schedule.costs import Costs, Link
from sppo.schedule.encoding import B, F, W
from sppo.schedule.generators import RankOrder, rank_orders
from sppo.schedule.played_step import PlayedStep
from sppo.schedule.timeline import Floats

_CODES = {"F": F, "B": B, "W": W}
_UNKNOWN = -1.0


def play_whole_units(
    name: str, *, num_ranks: int, lengths: Sequence[Sequence[int]], costs: Costs
) -> PlayedStep:
    """Simulate a step of the schedule `name`.

    Args:
        name: One of `generators.schedule_names()` that cuts no unit over ranks.
        num_ranks: Pipeline ranks.
        lengths: Tokens of every subsequence of every sequence.
        costs: Of as many stages and units; copies flow layer by layer.

    Raises:
        ValueError: a schedule that cannot serve the request.
    """
    assert costs.layer_copies, "copies of whole units are simulated by schedule.simulate"
    counts = [len(sequence) for sequence in lengths]
    offsets = np.concatenate([[0], np.cumsum(counts[:-1])]).astype(np.int64)
    inbox = [_Inbox(costs.num_units) for _ in range(num_ranks)]
    ranks: list[_Rank] = []
    before = None
    for stage, order in enumerate(rank_orders(name, num_ranks=num_ranks, lengths=lengths)):
        compute = ranks[-1].order if order is before else _compute(order, offsets.tolist())
        ranks.append(_Rank(stage, compute, costs=costs, inbox=inbox))
        before = order
    _play(ranks)
    step_s = max(rank.last_s for rank in ranks)
    idle = [[rank.bubble_s + step_s - rank.free_s, rank.message_s, rank.copy_s] for rank in ranks]
    held = [_held_bytes(rank, costs=costs, offsets=offsets) for rank in ranks]
    return PlayedStep(step_s, np.array(idle), np.array(held))


class _Compute(NamedTuple):
    """The compute of one rank in order: kinds, and units counted through all sequences."""

    codes: list[int]
    units: list[int]


class _Inbox:
    """When inputs of each unit of one stage were computed by a neighbour, and when they arrived."""

    def __init__(self, num_units: int) -> None:
        self.activation_made_s = [_UNKNOWN] * num_units
        self.activation_arrived_s = [_UNKNOWN] * num_units
        self.gradient_made_s = [_UNKNOWN] * num_units
        self.gradient_arrived_s = [_UNKNOWN] * num_units


class _Rank:
    """The clock of one rank; `run` waits, by yielding, for what a neighbour has yet to compute."""

    def __init__(
        self, stage: int, order: _Compute, *, costs: Costs, inbox: Sequence[_Inbox]
    ) -> None:
        self.stage, self.order = stage, order
        self.inbox = inbox[stage]
        self.below = inbox[stage - 1] if stage else None
        self.above = inbox[stage + 1] if stage + 1 < len(inbox) else None
        self.free_s = self._last_return_s = 0.0
        self.bubble_s = self.message_s = self.copy_s = 0.0
        self._load_costs(costs)
        self._leaving_s = self._returning_s = self._block_out_s = 0.0
        self._before_s = self._layer_s = 0.0
        self._gone_s = [0.0] * costs.num_units

    def _load_costs(self, costs: Costs) -> None:
        stage = self.stage
        self.forward_s: list[float] = costs.forward_s[stage].tolist()
        self.weight_s: list[float] = costs.weight_s[stage].tolist()
        backward = costs.backward_s[stage]
        if W not in self.order.codes:
            backward = backward + costs.weight_s[stage]
        self.backward_s: list[float] = backward.tolist()
        self.reduce_s = float(costs.reduce_s[stage])
        offloaded = costs.offload_bytes[stage]
        self.out_s: list[float] = (offloaded / costs.copies.d2h_bytes_per_s).tolist()
        self.back_s: list[float] = (offloaded / costs.copies.h2d_bytes_per_s).tolist()
        self.leaves: list[bool] = (offloaded > 0).tolist()
        self.flow = costs.layer_copies[stage]
        self.down, self.up = (
            _Wire(costs.links.link(stage, receiver=other), costs=costs)
            for other in (stage + 1, stage - 1)
        )

    @property
    def last_s(self) -> float:
        """When its last action has ended."""
        reduced = self.free_s + self.reduce_s
        arrived = max(self.down.last_s, self.up.last_s)
        return max(reduced, arrived, self._leaving_s, self._last_return_s)

    def run(self) -> Iterator[None]:
        """Walk the order of the rank to its end."""
        activations = self.inbox.activation_arrived_s
        gradients = self.inbox.gradient_arrived_s
        if self.below is None:
            activations = [0.0] * len(activations)
        if self.above is None:
            gradients = [0.0] * len(gradients)
        # The room for a unit that comes back is free when the backward two in front of its own has
        # ended: when that in front of it might begin.
        begun_s = room_s = 0.0
        first_backward = True
        for code, unit in zip(*self.order, strict=True):
            begun_before_s, begun_s = begun_s, self.free_s
            if code == F:
                while activations[unit] < 0:
                    yield
                self._forward(unit, activations[unit])
            elif code == B:
                while gradients[unit] < 0:
                    yield
                self._backward(unit, gradients[unit], begun_before_s if first_backward else room_s)
                first_backward, room_s = False, begun_s
            else:
                self.free_s += self.weight_s[unit]

    def _forward(self, unit: int, arrived: float) -> None:
        """Run a forward, and send off what it makes and what leaves the device."""
        seconds, leaves, free = self.forward_s[unit], self.leaves[unit], self.free_s
        start = arrived if arrived > free else free
        if leaves:
            room_s = self.flow.forward_start_s(
                start,
                seconds=seconds,
                copy_s=self.out_s[unit],
                free_s=self._leaving_s,
                block_before_s=self._block_out_s,
            )
            if room_s > start:
                start = room_s
        if start > free:
            self._wait(start, self.inbox.activation_made_s[unit], arrived)
        self.free_s = finish = start + seconds
        if self.above is not None:
            self.above.activation_made_s[unit] = finish
            self.above.activation_arrived_s[unit] = self.down.send(unit, ready=finish)
        if leaves:
            copy_s, layers = self.out_s[unit], self.flow.layers
            self._block_out_s = copy_s / layers
            begin = max(self._leaving_s, finish - seconds * (layers - 1) / layers)
            self._leaving_s = max(begin + copy_s, finish + self._block_out_s)
            self._gone_s[unit] = self._leaving_s

    def _backward(self, unit: int, arrived: float, room_s: float) -> None:
        """Run a backward, behind the copy back of its unit, for which there is room at `room_s`."""
        seconds, free, flow = self.backward_s[unit], self.free_s, self.flow
        layer_s = seconds / flow.layers
        start = arrived if arrived > free else free
        if self.leaves[unit]:
            permitted, copy_s = max(self._gone_s[unit], room_s), self.back_s[unit]
            first = max(permitted, self._returning_s, self._before_s - flow.back * self._layer_s)
            start, last = flow.backward_start_s(
                max(start, permitted), first=first, layer_s=layer_s, copy_s=copy_s
            )
            self._returning_s = first + copy_s
            self._last_return_s = max(self._last_return_s, last)
        if start > free:
            self._wait(start, self.inbox.gradient_made_s[unit], arrived)
        self.free_s = self._before_s = finish = start + seconds
        self._layer_s = layer_s
        if self.below is not None:
            self.below.gradient_made_s[unit] = finish
            self.below.gradient_arrived_s[unit] = self.up.send(unit, ready=finish)

    def _wait(self, start: float, made: float, arrived: float) -> None:
        """Book what compute that begins at `start` waited for."""
        computed = max(self.free_s, made)
        delivered = max(computed, arrived)
        self.bubble_s += computed - self.free_s
        self.message_s += delivered - computed
        self.copy_s += start - delivered


class _Wire:
    """One direction of the link between two neighbours; messages pass one behind the other."""

    def __init__(self, link: Link, *, costs: Costs) -> None:
        self.seconds: list[float] = (costs.message_bytes / link.bytes_per_s).tolist()
        self.latency_s = link.latency_s
        self.free_s = self.last_s = 0.0

    def send(self, unit: int, *, ready: float) -> float:
        """Send what belongs to a unit; return when it arrives."""
        begin = ready if ready > self.free_s else self.free_s
        self.free_s = begin + self.seconds[unit]
        self.last_s = self.free_s + self.latency_s
        return self.last_s


def _compute(order: RankOrder, offsets: list[int]) -> _Compute:
    return _Compute(
        [_CODES[kind] for kind, _ in order],
        [offsets[sequence] + subsequence for _, (_, (sequence, subsequence)) in order],
    )


def _play(ranks: Sequence[_Rank]) -> None:
    """Resume rank after rank, down the pipeline and up again, until all have ended."""
    walks = [rank.run() for rank in ranks]
    going = list(range(len(walks)))
    while going:
        going = [place for place in reversed(going) if next(walks[place], _ENDED) is not _ENDED]


_ENDED = object()


def _held_bytes(rank: _Rank, *, costs: Costs, offsets: np.typing.NDArray[np.int64]) -> float:
    """Peak of what the units of a rank hold, from the order of its compute alone."""
    stage = rank.stage
    codes, units = np.array(rank.order.codes), np.array(rank.order.units)
    counts = np.diff(np.append(offsets, costs.num_units))
    is_first, is_last = np.zeros((2, costs.num_units), dtype=bool)
    is_first[offsets] = is_last[offsets + counts - 1] = True

    def of_sequences(sizes: Floats) -> Floats:
        whole: Floats = np.repeat(np.add.reduceat(sizes, offsets), counts)
        return whole

    kv, gradients = (
        of_sequences(table[stage]) for table in (costs.kv_bytes, costs.kv_gradient_bytes)
    )
    kept = costs.activation_bytes[stage] - costs.offload_bytes[stage]
    operands = costs.operand_bytes[stage] * bool((codes == W).any())
    taken = np.select(
        [codes == F, codes == B],
        [(kept + is_first * kv)[units], (is_last * gradients)[units]],
        0.0,
    )
    released = np.select(
        [codes == B, codes == W],
        [(kept + is_first * (kv + gradients))[units], operands[units]],
        0.0,
    )
    # Operands of a weight half come as what its backward ends to hold goes.
    change = taken - released + np.where(codes == B, operands[units], 0.0)
    after = np.cumsum(change)
    held = np.maximum(after, after - change + taken)
    return max(0.0, float(held.max(initial=0.0)))
