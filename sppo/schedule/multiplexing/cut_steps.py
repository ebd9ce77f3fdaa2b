"""Steps with different units cut over ranks (MSP): order of actions, program, and step time.

Within a sequence, forwards run in the order in which they can start, and backwards in the reverse
order, on all ranks. So one walk along that order gives the step time, equal to the result of the
simulation (:mod:`sppo.schedule.simulation.simulate`) of the program, without making the program.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from sppo.schedule.actions import UNITS_AHEAD, Cut, Op
from sppo.schedule.costs import Costs
from sppo.schedule.graph import Ints
from sppo.schedule.msp_costs import msp_seconds
from sppo.schedule.msp_groups import MspGroup, Route, routes_between
from sppo.schedule.schedule import Schedule
from sppo.schedule.transfers.communication import with_reductions

_Messages = list[tuple[int, float, float]]
"""Messages of a unit between two stages: (link, seconds on the link, latency after that)."""


class CutSteps:
    """Programs and times of one schedule's step with chosen units cut.

    Args:
        plain: Schedule with every unit on the rank of its stage.
        costs: Costs of its actions.
        groups: MSP groups that a step may have, by slot.
        forward_only_stages: Number of first stages without a backward.
    """

    def __init__(
        self,
        plain: Schedule,
        *,
        costs: Costs,
        groups: Mapping[int, MspGroup],
        forward_only_stages: int = 0,
    ) -> None:
        self.plain, self.costs, self.groups = plain, costs, groups
        self._units, self._size = costs.num_units, costs.num_stages * costs.num_units
        self._offsets = plain.unit_offsets
        self._rank_of = [plain.placement.rank_of(stage) for stage in range(costs.num_stages)]
        last, self._forward_only = plain.num_ranks - 1, forward_only_stages
        self._waits_for_next = [
            stage < forward_only_stages and rank < last for stage, rank in enumerate(self._rank_of)
        ]
        self._reduce_s: list[float] = costs.reduce_s.tolist()
        self._whole_s: dict[int, list[float]] = {
            Op.F: costs.forward_s.ravel().tolist(),
            Op.B: (costs.backward_s + costs.weight_s).ravel().tolist(),
        }
        priced = self._of_columns(plain.columns, groups=groups)
        self._cut_s = msp_seconds(priced, groups=groups, costs=costs)
        self._messages: dict[tuple[int, int, bool, bool], _Messages] = {}

    def saved_s(self, slot: int) -> float:
        """Return the seconds that an MSP group saves over its whole unit, its messages included."""
        passes = (Op.F, Op.B) if self._has_backward(slot) else (Op.F,)
        return sum(self._whole_s[code][slot] - self._cut_s[code, slot] for code in passes)

    def program(self, chosen: Mapping[int, MspGroup]) -> Schedule:
        """Return the schedule with exactly the MSP groups `chosen`."""
        actions: list[tuple[int, ...]] = []
        for sequence in range(self.plain.num_sequences):
            forwards = [
                (rank, Op.F, slot, shard, len(holders))
                for slot in self._order(sequence, chosen)
                for holders in [self._holders(slot, chosen)]
                for shard, (rank, _) in enumerate(holders)
            ]
            backwards = [
                (rank, Op.B, *unit)
                for rank, _, *unit in reversed(forwards)
                if self._has_backward(unit[0])
            ]
            actions += [*forwards, *backwards]
        columns = np.array(actions, dtype=np.int64).T
        columns = columns[:, np.argsort(columns[0], kind="stable")]
        # Borrowers send their gradients to the owner of a stage, so only the owner reduces.
        return with_reductions(self._of_columns(columns, groups=chosen))

    def _has_backward(self, slot: int) -> bool:
        """Return whether the stage of a slot has a backward."""
        return slot >= self._forward_only * self._units

    def _of_columns(self, columns: Ints, *, groups: Mapping[int, MspGroup]) -> Schedule:
        """Return a schedule with MSP groups, whose shards differ if compute grows with context."""
        plain, cuts = self.plain, []
        if self.costs.context_slope != 0:
            for slot, group in groups.items():
                stage, unit = divmod(slot, self._units)
                cuts.append(Cut(stage, *plain.keys[unit], group.lengths))
        return Schedule(plain.name, plain.placement, plain.lengths, columns, tuple(sorted(cuts)))

    def step_s(self, chosen: Mapping[int, MspGroup]) -> float:
        """Return the simulated seconds of a step with exactly the MSP groups `chosen`."""
        units, size, rank_of = self._units, self._size, self._rank_of
        num_ranks, num_sequences = self.plain.num_ranks, self.plain.num_sequences
        free, sent = [0.0] * num_ranks, [0.0] * num_ranks**2
        passes = itertools.product(range(num_sequences), (Op.F, Op.B))
        made_by = {Op.F: [0.0] * size, Op.B: [0.0] * size}
        order: list[int] = []
        for sequence, code in passes:
            # Backwards take the reverse order, and the way back from stage to stage.
            if code == Op.F:
                order = self._order(sequence, chosen)
            else:
                order = [*filter(self._has_backward, reversed(order))]
            to_next, to_before = (units, -1) if code == Op.F else (-units, 1)
            begins, ends = order[0] % units, order[-1] % units
            reduces = code == Op.B and sequence == num_sequences - 1
            first_taker = 0 if code == Op.F else self._forward_only * units
            whole_s, made, arrived = self._whole_s[code], made_by[code], [0.0] * size
            for slot in order:
                stage, unit = divmod(slot, units)
                start = arrived[slot]
                if unit != begins and made[slot + to_before] > start:
                    start = made[slot + to_before]
                if self._waits_for_next[stage] and unit >= UNITS_AHEAD:
                    start = max(start, made_by[Op.F][slot + units - UNITS_AHEAD])
                if slot in chosen:
                    ranks = chosen[slot].ranks
                    start = max(start, *[free[rank] for rank in ranks])
                    end = start + self._cut_s[code, slot]
                    for rank in ranks:
                        free[rank] = end
                else:
                    rank = rank_of[stage]
                    start = free[rank] if free[rank] > start else start
                    end = free[rank] = start + whole_s[slot]
                made[slot] = end
                target = slot + to_next
                if first_taker <= target < size:
                    arrived[target] = _arrival_s(end, self._sent(slot, target, chosen), sent)
                if reduces and unit == ends and stage >= self._forward_only + num_ranks:
                    free[rank_of[stage]] += self._reduce_s[stage]
        # A rank's first stage with a backward ends last; its reduction ends the rank's program.
        for stage, rank in [*enumerate(rank_of)][self._forward_only :][:num_ranks]:
            free[rank] += self._reduce_s[stage]
        return max(free)

    def _sent(self, slot: int, target: int, chosen: Mapping[int, MspGroup]) -> _Messages:
        """Return the messages of a unit to an adjacent stage."""
        key = slot, target, slot in chosen, target in chosen
        if key not in self._messages:
            # Routes are defined for activations; gradients take the same routes in reverse.
            ends = (self._holders(one, chosen) for one in sorted((slot, target)))
            routes = routes_between(*ends)
            self._messages[key] = [
                self._message(slot % self._units, route if slot < target else route.reversed())
                for route in routes
                if route.sender != route.receiver
            ]
        return self._messages[key]

    def _message(self, unit: int, route: Route) -> tuple[int, float, float]:
        link = self.costs.links.link(route.sender, receiver=route.receiver)
        wire_s = float(self.costs.message_bytes[unit]) * route.share / link.bytes_per_s
        return route.sender * self.plain.num_ranks + route.receiver, wire_s, link.latency_s

    def _holders(self, slot: int, chosen: Mapping[int, MspGroup]) -> Sequence[tuple[int, int]]:
        """Return rank and tokens of each shard of a unit on a stage."""
        if slot in chosen:
            return chosen[slot].holders
        stage, unit = divmod(slot, self._units)
        return [(self._rank_of[stage], self.plain.tokens[unit])]

    def _order(self, sequence: int, chosen: Mapping[int, MspGroup]) -> list[int]:
        """Return the slots of a sequence in the order of their starts; ties: most ranks first.

        Only the next unit of each stage can be ready, so the heap never holds more than one
        entry per stage; an entry whose ranks were taken meanwhile goes back with a later start.
        """
        num_ranks, num_stages, units = self.plain.num_ranks, self.costs.num_stages, self._units
        rank_of, whole_s, cut_s = self._rank_of, self._whole_s[Op.F], self._cut_s
        first = self._offsets[sequence]
        end = first + len(self.plain.lengths[sequence])
        done, free = [0.0] * self._size, [0.0] * num_ranks
        next_unit, is_offered = [first] * num_stages, [False] * num_stages
        order: list[int] = []
        ready = [(0.0, 0, first)]
        while ready:
            start, _, slot = heapq.heappop(ready)
            stage, group = slot // units, chosen.get(slot)
            ranks = group.ranks if group else (rank_of[stage],)
            earliest = max([start, *[free[rank] for rank in ranks]])
            if earliest > start:
                heapq.heappush(ready, (earliest, -len(ranks), slot))
                continue
            order.append(slot)
            done[slot] = ended = start + (cut_s[Op.F, slot] if group else whole_s[slot])
            for rank in ranks:
                free[rank] = ended
            next_unit[stage] += 1
            is_offered[stage] = False
            for follower in (max(0, stage - 1), stage, stage + 1, stage + num_ranks):
                if follower >= num_stages or is_offered[follower]:
                    continue
                unit, before = next_unit[follower], follower - num_ranks
                if unit == end or (follower and next_unit[follower - 1] <= unit):
                    continue
                if before >= 0 and next_unit[before] < end:  # the rank's stage before this
                    continue
                waits = self._waits_for_next[follower]
                if waits and next_unit[follower + 1] <= unit - UNITS_AHEAD:
                    continue
                offered = follower * units + unit
                earliest = done[offered - units] if follower else 0.0
                if unit > first and done[offered - 1] > earliest:
                    earliest = done[offered - 1]
                if waits and unit - UNITS_AHEAD >= first:
                    earliest = max(earliest, done[offered + units - UNITS_AHEAD])
                width = len(chosen[offered].ranks) if offered in chosen else 1
                heapq.heappush(ready, (earliest, -width, offered))
                is_offered[follower] = True
        return order


def _arrival_s(end_s: float, messages: _Messages, sent: list[float]) -> float:
    """Return when a unit that ends at `end_s` is at the next stage.

    Args:
        end_s: End of the unit.
        messages: Messages that carry it.
        sent: Moment from which on each link is free, which the messages change.
    """
    arrival = end_s
    for edge, wire_s, latency_s in messages:
        sent[edge] = max(sent[edge], end_s) + wire_s
        arrival = max(arrival, sent[edge] + latency_s)
    return arrival
