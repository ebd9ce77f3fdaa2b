"""Simulation of pipeline ranks that all run their compute in the same order, many ranks at a time.

An action needs the result of the action before it on its rank, and that of the action at the same
place of the order on a neighbouring rank. So the actions of a diagonal, at place d - r of rank r
for forwards and at place d - p + 1 + r for backwards, need nothing of each other, and their times
are computed together. The times equal those of :mod:`sppo.schedule.simulation.whole_units` bit for
bit.

Legend: p ranks, n units of a pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from sppo.schedule.costs import Costs, Table
from sppo.schedule.encoding import B, F, W

_LEAST_AT_ONCE = 12
"""Mean number of actions on a diagonal from which it takes less time than one action after the
other."""
_UNKNOWN = -1.0


class Compute(NamedTuple):
    """Compute of one rank in order: opcodes, virtual stages, units numbered over sequences."""

    codes: list[int]
    virtual: list[int]
    units: list[int]


class _Pass(NamedTuple):
    """Successive actions of one opcode on one virtual stage of every rank."""

    code: int
    virtual: int
    units: list[int]


def runs_in_lockstep(order: Compute, *, num_ranks: int) -> bool:
    """Return whether ranks that all run `order` can be simulated by diagonals, and faster so.

    Deferred weight gradients (W) cannot, and neither can an order in which ranks would wait for
    each other forever.
    """
    if W in order.codes or not _follows_stages(order):
        return False
    diagonals = len(order.codes) + (num_ranks - 1) * len([*_passes(order)])
    return len(order.codes) * num_ranks >= _LEAST_AT_ONCE * diagonals


def _follows_stages(order: Compute) -> bool:
    """Return whether every action comes after the action that makes its input."""
    last, done = max(order.virtual, default=0), set()
    for code, virtual, unit in zip(*order, strict=True):
        if code == F:
            source = (F, virtual - 1, unit) if virtual else None
        else:
            source = (B, virtual + 1, unit) if virtual < last else (F, last, unit)
        if source is not None and source not in done:
            return False
        done.add((code, virtual, unit))
    return True


def _passes(order: Compute) -> Iterator[_Pass]:
    """Yield the passes of an order."""
    for (code, virtual), actions in groupby(zip(*order, strict=True), key=lambda one: one[:2]):
        yield _Pass(code, virtual, [unit for _, _, unit in actions])


class _Wires:
    """Links from each rank to its next rank in one direction of passing, [p] each."""

    def __init__(self, costs: Costs, *, num_ranks: int, step: int) -> None:
        links = [
            costs.links.link(rank, receiver=(rank + step) % num_ranks) for rank in range(num_ranks)
        ]
        self.bytes_per_s = np.array([link.bytes_per_s for link in links])
        self.latency_s = np.array([link.latency_s for link in links])
        self.free_s, self.last_s = np.zeros((2, num_ranks))


class LockstepRanks:
    """Clocks of all ranks of a step, [p] each; the names are those of one rank in `whole_units`.

    Args:
        order: Order of the compute of every rank.
        num_ranks: Pipeline ranks.
        costs: Costs of all stages and units.
    """

    def __init__(self, order: Compute, *, num_ranks: int, costs: Costs) -> None:
        assert num_ranks > 2, "between two ranks, both directions share their links"
        self.num_ranks, num_virtual = num_ranks, costs.num_stages // num_ranks
        self.free_s, self.bubble_s, self.message_s, self.copy_s = np.zeros((4, num_ranks))
        self.leaving_s, self.returning_s, self.last_return_s = np.zeros((3, num_ranks))
        self.block_out_s, self.before_s, self.layer_s = np.zeros((3, num_ranks))
        self.begun_s, self.room_s, self.reducing_s = np.zeros((3, num_ranks))
        self.wires = {
            code: _Wires(costs, num_ranks=num_ranks, step=step) for code, step in ((F, 1), (B, -1))
        }
        self.ends_s = np.zeros((num_ranks, len(order.codes)))
        self.gone_s = np.zeros((costs.num_stages, costs.num_units))
        # When inputs were computed and arrived: in forward on the first rank of each virtual stage,
        # in backward on the last.
        self.made_s = {code: np.full((num_virtual, costs.num_units), _UNKNOWN) for code in (F, B)}
        self.arrived_s = {code: table.copy() for code, table in self.made_s.items()}
        self.arrived_s[F][0] = self.arrived_s[B][-1] = 0.0
        self._play([*_passes(order)], costs)

    @property
    def last_s(self) -> Table:
        """End of the last action of each rank."""
        ends = self.free_s + self.reducing_s, self.leaving_s, self.last_return_s
        last: Table = np.max([*ends, *(wires.last_s for wires in self.wires.values())], axis=0)
        return last

    def _play(self, passes: Sequence[_Pass], costs: Costs) -> None:
        last_of = {one.virtual: place for place, one in enumerate(passes)}
        begun_backward, done = False, 0
        for place, one in enumerate(passes):
            self.free_s += self.reducing_s
            self.message_s += self.reducing_s
            self.reducing_s[:] = 0.0
            if one.code == B and not begun_backward:
                self.room_s[:], begun_backward = self.begun_s, True
            walk = _ForwardWalk if one.code == F else _BackwardWalk
            self.ends_s[:, done : done + len(one.units)] = walk(self, one, costs).walk()
            done += len(one.units)
            if last_of[one.virtual] == place:
                first = one.virtual * self.num_ranks
                self.reducing_s[:] = costs.reduce_s[first : first + self.num_ranks]


class _PassWalk:
    """Walk through one pass, diagonal by diagonal.

    Ranks are numbered in the order in which units pass them. Tables of the pass are flat, one row
    of n units for each rank.

    Args:
        ranks: Clocks that the walk moves on.
        one: Pass to walk through.
        costs: Costs of all stages and units.
    """

    def __init__(self, ranks: LockstepRanks, one: _Pass, costs: Costs) -> None:
        self._ranks, self._pass, self._costs = ranks, one, costs
        self._num_ranks, self._count = ranks.num_ranks, len(one.units)
        self._turn = slice(None, None, 1 if one.code == F else -1)
        first = one.virtual * ranks.num_ranks
        self._stages = slice(first, first + ranks.num_ranks)
        wires, self._free_s = ranks.wires[one.code], self._of_ranks(ranks.free_s)
        self._idle_s = [
            self._of_ranks(table) for table in (ranks.bubble_s, ranks.message_s, ranks.copy_s)
        ]
        self._wire_free_s, self._wire_last_s, self._latency_s = (
            self._of_ranks(table) for table in (wires.free_s, wires.last_s, wires.latency_s)
        )
        rates = self._of_ranks(wires.bytes_per_s)[:, None]
        self._wire_s = (costs.message_bytes[one.units] / rates).ravel()
        self._layers, self._out, self._back = (
            self._of_ranks(np.array([getattr(flow, name) for flow in flows]))[:, None]
            for flows in [costs.layer_copies[self._stages]]
            for name in ("layers", "out", "back")
        )
        self._offloaded = self._rows(costs.offload_bytes)
        self._leaves = (self._offloaded > 0).ravel()
        self._any_leaves = bool(self._leaves.any())
        # When inputs of each rank were computed and arrived; the last entries are for the next
        # stage of the first rank.
        self._made_s, self._arrived_s = np.zeros((2, self._num_ranks + 1))
        self._seconds = np.zeros(self._num_ranks * self._count)

    def _of_ranks(self, table: Table) -> Table:
        """Return a view of a table [p, ...], in the order in which units pass the ranks."""
        view: Table = table[self._turn]
        return view

    def _rows(self, table: Table) -> Table:
        """Return the part of a table [stages, units] that belongs to the pass, [p, n]."""
        rows: Table = self._of_ranks(table[self._stages])[:, self._pass.units]
        return rows

    def walk(self) -> Table:
        """Move the clocks through the pass; return the ends of its actions, [p, n]."""
        code, virtual, units = self._pass
        made, arrived = (
            table[code][virtual, units] for table in (self._ranks.made_s, self._ranks.arrived_s)
        )
        assert (arrived >= 0).all(), "ranks of equal order run the stage before first"
        to_next = virtual + (1 if code == F else -1)
        is_end = not 0 <= to_next < len(self._ranks.made_s[code])
        ends = np.zeros(self._num_ranks * self._count)
        for diagonal in range(self._count + self._num_ranks - 1):
            low, high = max(0, diagonal - self._count + 1), min(self._num_ranks, diagonal + 1)
            begin, step = low * self._count + diagonal - low, max(1, self._count - 1)
            own, at = slice(low, high), slice(begin, begin + (high - low - 1) * step + 1, step)
            if diagonal < self._count:
                self._made_s[0], self._arrived_s[0] = made[diagonal], arrived[diagonal]
            ends[at] = finish = self._run(own, at)
            self._send(slice(low, min(high, self._num_ranks - is_end)), at, finish)
            if high == self._num_ranks and not is_end:
                unit = units[diagonal - high + 1]
                self._ranks.made_s[code][to_next, unit] = self._made_s[-1]
                self._ranks.arrived_s[code][to_next, unit] = self._arrived_s[-1]
        self._settle()
        return self._of_ranks(ends.reshape(self._num_ranks, self._count))

    def _run(self, own: slice, at: slice) -> Table:
        """Run the actions of a diagonal; return their ends.

        Args:
            own: Ranks of the diagonal.
            at: Places of the diagonal in the tables of the pass.
        """
        raise NotImplementedError

    def _settle(self) -> None:
        """Store what later passes need."""

    def _finish(self, own: slice, at: slice, start: Table) -> Table:
        """Occupy the ranks from `start` on, and record why they waited; return the ends."""
        free = self._free_s[own]
        computed = np.maximum(free, self._made_s[own])
        delivered = np.maximum(computed, self._arrived_s[own])
        bubble_s, message_s, copy_s = (table[own] for table in self._idle_s)
        bubble_s += computed - free
        message_s += delivered - computed
        copy_s += start - delivered
        free[:] = start + self._seconds[at]
        return free

    def _send(self, senders: slice, at: slice, finish: Table) -> None:
        """Send the results of a diagonal from `senders`, which are its first ranks."""
        count = senders.stop - senders.start
        after = slice(senders.start + 1, senders.stop + 1)
        sent = np.maximum(finish[:count], self._wire_free_s[senders]) + self._wire_s[at][:count]
        self._wire_free_s[senders] = sent
        self._made_s[after] = finish[:count]
        self._wire_last_s[senders] = self._arrived_s[after] = sent + self._latency_s[senders]


class _ForwardWalk(_PassWalk):
    """Walk through the forwards of a pass, whose offloaded blocks leave during the next forward."""

    def __init__(self, ranks: LockstepRanks, one: _Pass, costs: Costs) -> None:
        super().__init__(ranks, one, costs)
        seconds, layers = self._rows(costs.forward_s), self._layers
        copy_s = self._offloaded / costs.copies.d2h_bytes_per_s
        layer_s, block_s, beyond = seconds / layers, copy_s / layers, layers - self._out
        self._seconds, self._out_s, self._block_s = seconds.ravel(), copy_s.ravel(), block_s.ravel()
        self._layer_s, self._later_s = layer_s.ravel(), ((layers - 1) * layer_s).ravel()
        self._first_layers_s = (seconds * (layers - 1) / layers).ravel()
        self._beyond, self._in_flight = beyond[:, 0], self._out[:, 0] - 1
        self._layers_beyond_s, self._fewer_layers_s, self._blocks_beyond_s = (
            table.ravel() for table in (beyond * layer_s, (beyond - 1) * layer_s, beyond * block_s)
        )
        self._gone_s = np.zeros(seconds.size)
        self._leaving_s, self._block_out_s, self._begun_s = (
            self._of_ranks(table) for table in (ranks.leaving_s, ranks.block_out_s, ranks.begun_s)
        )

    def _run(self, own: slice, at: slice) -> Table:
        self._begun_s[own] = self._free_s[own]
        start = np.maximum(self._arrived_s[own], self._free_s[own])
        if not self._any_leaves:
            return self._finish(own, at, start)
        leaves, leaving = self._leaves[at], self._leaving_s[own]
        room_s = self._start_with_room(own, at, start)
        finish = self._finish(own, at, np.maximum(start, room_s, where=leaves, out=start))
        block_s = self._block_s[at]
        begin = np.maximum(leaving, finish - self._first_layers_s[at])
        gone = np.maximum(begin + self._out_s[at], finish + block_s)
        for table in (leaving, self._gone_s[at]):
            np.copyto(table, gone, where=leaves)
        np.copyto(self._block_out_s[own], block_s, where=leaves)
        return finish

    def _start_with_room(self, own: slice, at: slice, start: Table) -> Table:
        """Return :meth:`sppo.schedule.costs.LayerCopies.forward_start_s` of a diagonal."""
        free, beyond, before = self._leaving_s[own], self._beyond[own], self._block_out_s[own]
        first_ends = free - self._in_flight[own] * before + self._later_s[at]
        first = np.maximum(free, start + self._layer_s[at])
        several = np.maximum(
            np.maximum(free + self._layers_beyond_s[at], first + self._blocks_beyond_s[at]),
            first + self._block_s[at] + self._fewer_layers_s[at],
        )
        end = np.maximum(first_ends, np.where(beyond <= 0, free + beyond * before, several))
        found: Table = end - self._seconds[at]
        return found

    def _settle(self) -> None:
        gone = self._of_ranks(self._gone_s.reshape(self._num_ranks, self._count))
        self._ranks.gone_s[self._stages, self._pass.units] = gone


class _BackwardWalk(_PassWalk):
    """Walk through the backwards of a pass, whose blocks come back during the backward before."""

    def __init__(self, ranks: LockstepRanks, one: _Pass, costs: Costs) -> None:
        super().__init__(ranks, one, costs)
        seconds, layers = self._rows(costs.backward_s + costs.weight_s), self._layers
        copy_s = self._offloaded / costs.copies.h2d_bytes_per_s
        layer_s, behind = seconds / layers, layers - 1
        self._seconds, self._layer_s = seconds.ravel(), layer_s.ravel()
        self._back_s, self._block_s = copy_s.ravel(), (copy_s / layers).ravel()
        self._behind_s = (behind * layer_s).ravel()
        self._ahead_s = (np.maximum(0, behind - self._back) * layer_s).ravel()
        self._gone_s = self._rows(ranks.gone_s).ravel()
        self._blocks_ahead = self._back[:, 0]
        self._room_s, self._before_s, self._layer_before_s = (
            self._of_ranks(table) for table in (ranks.room_s, ranks.before_s, ranks.layer_s)
        )
        self._returning_s, self._last_return_s = (
            self._of_ranks(table) for table in (ranks.returning_s, ranks.last_return_s)
        )

    def _run(self, own: slice, at: slice) -> Table:
        free = self._free_s[own].copy()
        start = np.maximum(self._arrived_s[own], free)
        if self._any_leaves:
            self._bring_back(own, at, start)
        finish = self._finish(own, at, start)
        self._room_s[own], self._before_s[own] = free, finish
        self._layer_before_s[own] = self._layer_s[at]
        return finish

    def _bring_back(self, own: slice, at: slice, start: Table) -> None:
        """Delay `start` until no backward waits for blocks, and record when they are back.

        See :meth:`sppo.schedule.costs.LayerCopies.backward_start_s`.
        """
        leaves, block_s, returning = self._leaves[at], self._block_s[at], self._returning_s[own]
        permitted = np.maximum(self._gone_s[at], self._room_s[own])
        layers_before_s = self._blocks_ahead[own] * self._layer_before_s[own]
        first = np.maximum(permitted, returning)
        first = np.maximum(first, self._before_s[own] - layers_before_s)
        end = first + self._back_s[at]
        begin = np.maximum(np.maximum(start, permitted), first + block_s)
        begin = np.maximum(begin, end - self._behind_s[at])
        last = np.maximum(end, begin + self._ahead_s[at] + block_s)
        last_return = self._last_return_s[own]
        np.maximum(last_return, last, where=leaves, out=last_return)
        np.copyto(start, begin, where=leaves)
        np.copyto(returning, end, where=leaves)
