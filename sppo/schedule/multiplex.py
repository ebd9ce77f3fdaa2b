"""Multiplexed sequence partitioning (MSP): the SPPO paper's answer to the bubbles at both ends.

The first subsequences enter a pipeline whose later ranks have nothing to do yet, and the last
ones leave one whose earlier ranks have nothing left to do. MSP cuts those units once more, in
space, over the ranks that would wait (paper section 6, Table 3). For stage i of P:

* left units {0 .. P-2-i} run on ranks {i .. P-1};
* steady units {P-1-i .. N-1-i} run on rank i alone;
* right units {N-i .. N-1} run on ranks {0 .. i}.

Backward is the mirror image, on the same ranks, because they hold the activations. With unit costs
and free messages P=4, N=8 takes 8 1/3 forward units against 11.

Ranks with several stages that run breadth first (`looped_bfs`) wait before the first units of their
first stages and behind the last units of their last ones: these are the left and the right units,
and all between is run as it was.

Cutting a unit moves weights, K/V and gradients (`groups.msp_seconds`), so it is a choice: what the
first of a run of units brings to the borrowers serves the whole run, so a run stays only if it pays
for itself and if the step is longer without it. When nothing pays, the schedule is the plain
program.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from sppo.schedule import encoding
from sppo.schedule.actions import Action, ActionKind, Cut, Placement, Schedule
from sppo.schedule.costs import Costs, abstract_costs
from sppo.schedule.encoding import encode
from sppo.schedule.event_loop import run_clock
from sppo.schedule.msp_groups import MspGroup, balanced_shards, msp_seconds
from sppo.schedule.orders import with_reductions

# Up to this many MSP groups, runs and single MSP groups are dropped one by one; of more, the best
# eighths of the runs are tried; of MSP groups with so many shards that one trial takes seconds,
# all, the better half and none.
_TRIED_ALONE = 64
_NESTED_CHOICES = 8
_DEPTHS_TRIED = 8
_MANY_SHARDS = 20_000
_TOLERANCE = 1e-9


def multiplexed_ranks(stage: int, *, unit: int, placement: Placement, num_units: int) -> range:
    """The ranks that run subsequence `unit` of `num_units` on `stage` (the paper's Table 3).

    Where ranks have several stages, ranks idle while their first one waits for the first units and
    behind the last units of their last one. When a sequence has fewer subsequences than there are
    ranks, a unit can be both left and right; left wins, because its bubble comes first.
    """
    num_ranks, rank = placement.num_ranks, placement.rank_of(stage)
    if stage < num_ranks and unit <= num_ranks - 2 - rank:
        return range(rank, num_ranks)
    if stage >= placement.num_stages - num_ranks and unit >= num_units - rank:
        return range(rank + 1)
    return range(rank, rank + 1)


def multiplex(
    plain: Schedule, *, forward_only: bool = False, costs: Costs | None = None
) -> Schedule:
    """The fastest of the plain schedule and those with some units cut over idle ranks.

    Several sequences run one after another, each almost without a bubble; if that is slower than
    letting them overlap, the plain schedule is returned.

    Args:
        plain: Every unit on the rank of its stage; of several on a rank, breadth first.
        forward_only: Leave out the backward.
        costs: What to weigh with; equal units and free messages if not given.

    Raises:
        ValueError: costs for other stages or units.
    """
    num_stages, num_units = plain.num_stages, plain.num_units
    costs = costs or abstract_costs(num_stages, num_units=num_units)
    if (costs.num_stages, costs.num_units) != (num_stages, num_units):
        raise ValueError(
            f"costs of {costs.num_stages} stages and {costs.num_units} units for {num_stages} "
            f"stages and {num_units} units: make the costs for this schedule"
        )
    builder = _Builder(plain, costs=costs, forward_only=forward_only)
    alone = builder.of_one_sequence()
    chosen = _chosen(builder) if alone is None else builder.repeated(_chosen(alone))
    best = builder.build(chosen)
    return best if builder.makespan_s(best) < builder.makespan_s(plain) - _TOLERANCE else plain


def _chosen(builder: _Builder) -> Mapping[int, MspGroup]:
    ends = builder.of_ends()
    if ends is not None:
        return builder.between_ends(_chosen(ends))
    return builder.choose(_paying(builder.candidates(), builder=builder))


class _Builder:
    """Makes and times the schedule of a choice of MSP groups."""

    def __init__(self, plain: Schedule, *, costs: Costs, forward_only: bool) -> None:
        self.plain = plain
        self.costs = costs
        self.forward_only = forward_only
        self.offsets = plain.unit_offsets()

    def candidates(self) -> dict[int, MspGroup]:
        """An MSP group for every left and right unit that has a token for each shard."""
        groups = {}
        for sequence, parts in enumerate(self.plain.lengths):
            for subsequence, tokens in enumerate(parts):
                for stage in range(self.plain.num_stages):
                    ranks = multiplexed_ranks(
                        stage,
                        unit=subsequence,
                        placement=self.plain.placement,
                        num_units=len(parts),
                    )
                    if 1 < len(ranks) <= tokens:
                        slot = stage * self.costs.num_units + self.offsets[sequence] + subsequence
                        lengths = balanced_shards(
                            tokens,
                            num_shards=len(ranks),
                            start=sum(parts[:subsequence]),
                            context_slope=self.costs.context_slope,
                        )
                        groups[slot] = MspGroup(slot, tuple(ranks), lengths)
        return groups

    def seconds(self, groups: Mapping[int, MspGroup]) -> dict[tuple[int, int], float]:
        """Return the seconds of each MSP group if exactly these are chosen."""
        priced = replace(self.plain, cuts=self._cuts(groups.values()))
        return msp_seconds(priced, groups=groups, costs=self.costs)

    def serial_seconds(self, slot: int) -> tuple[float, float]:
        """F and B of a unit that is not cut."""
        stage, unit = divmod(slot, self.costs.num_units)
        backward = self.costs.backward_s[stage, unit] + self.costs.weight_s[stage, unit]
        return float(self.costs.forward_s[stage, unit]), float(backward)

    def build(self, groups: Mapping[int, MspGroup]) -> Schedule:
        """The schedule with exactly these MSP groups."""
        seconds = self.seconds(groups)
        programs: list[list[Action]] = [[] for _ in range(self.plain.num_ranks)]
        for sequence in range(self.plain.num_sequences):
            order = self._forward_order(sequence, groups=groups, seconds=seconds)
            for rank, forward in enumerate(order):
                programs[rank].extend(forward)
                if not self.forward_only:
                    mirrored = (a._replace(kind=ActionKind.B) for a in reversed(forward))
                    programs[rank].extend(mirrored)
        reduced = tuple(
            # Borrowers send their gradients home, so only the owner of a stage reduces it.
            tuple(with_reductions(program, stages=self.plain.placement.stages_of(rank)))
            for rank, program in enumerate(programs)
        )
        return replace(self.plain, programs=reduced, cuts=self._cuts(groups.values()))

    def _cuts(self, groups: Iterable[MspGroup]) -> tuple[Cut, ...]:
        """Token counts of shards, where compute grows with the context."""
        if self.costs.context_slope == 0:
            return ()
        cuts = []
        for group in groups:
            stage, unit = divmod(group.slot, self.costs.num_units)
            sequence = max(m for m, offset in enumerate(self.offsets) if offset <= unit)
            cuts.append(Cut(stage, sequence, unit - self.offsets[sequence], group.lengths))
        return tuple(sorted(cuts))

    def _forward_order(
        self,
        sequence: int,
        *,
        groups: Mapping[int, MspGroup],
        seconds: Mapping[tuple[int, int], float],
    ) -> list[list[Action]]:
        """Forward shards of each rank: earliest start first, of equal ones the widest MSP group.

        Only the next unit of each stage can be ready, so the heap never holds more than one
        entry per stage; an entry whose ranks were taken meanwhile goes back with a later start.
        """
        num_stages, units = self.plain.num_stages, len(self.plain.lengths[sequence])
        offset, total = self.offsets[sequence], self.costs.num_units
        done = [[0.0] * units for _ in range(num_stages)]
        next_unit = [0] * num_stages
        free = [0.0] * self.plain.num_ranks
        order: list[list[Action]] = [[] for _ in free]
        ready = [(0.0, 0, 0, 0)]
        while ready:
            start, _, stage, unit = heapq.heappop(ready)
            slot = stage * total + offset + unit
            group = groups.get(slot)
            ranks = group.ranks if group else (self.plain.placement.rank_of(stage),)
            earliest = max(start, *(free[rank] for rank in ranks))
            if earliest > start:
                heapq.heappush(ready, (earliest, -len(ranks), stage, unit))
                continue
            lasts = seconds[encoding.F, slot] if group else self.serial_seconds(slot)[0]
            done[stage][unit] = start + lasts
            for shard, rank in enumerate(ranks):
                free[rank] = start + lasts
                action = Action(
                    ActionKind.F, stage, sequence, unit, shard=shard, num_shards=len(ranks)
                )
                order[rank].append(action)
            next_unit[stage] += 1
            for follower in (stage, stage + 1, stage + self.plain.num_ranks):
                self._push_if_ready(
                    ready, follower, offset=offset, next_unit=next_unit, done=done, groups=groups
                )
        return order

    def _push_if_ready(
        self,
        ready: list[tuple[float, int, int, int]],
        stage: int,
        *,
        offset: int,
        next_unit: list[int],
        done: list[list[float]],
        groups: Mapping[int, MspGroup],
    ) -> None:
        """Offer the next unit of `stage` if its inputs have a time and it is not offered yet."""
        if stage >= len(next_unit) or next_unit[stage] >= len(done[stage]):
            return
        unit = next_unit[stage]
        if stage > 0 and next_unit[stage - 1] <= unit:
            return
        before = stage - self.plain.num_ranks
        if before >= 0 and next_unit[before] < len(done[before]):  # the rank's stage before this
            return
        if any(entry[2] == stage for entry in ready):
            return
        start = done[stage - 1][unit] if stage > 0 else 0.0
        if unit > 0:
            start = max(start, done[stage][unit - 1])
        group = groups.get(stage * self.costs.num_units + offset + unit)
        heapq.heappush(ready, (start, -len(group.ranks) if group else -1, stage, unit))

    def makespan_s(self, schedule: Schedule) -> float:
        """Simulated seconds of a step."""
        clock = run_clock(schedule, programs=encode(schedule), costs=self.costs)
        return max(max(times, default=0.0) for times in clock.finishes_s)

    def of_one_sequence(self) -> _Builder | None:
        """Return the builder of a step of one sequence, where all are cut alike and cost the same.

        Sequences follow one another in a program that cuts units, so what pays in one does in all.
        """
        lengths = self.plain.lengths
        count = len(lengths[0])
        if len(lengths) == 1 or set(lengths) != {lengths[0]} or not self.costs.repeats(count):
            return None
        return _Builder(
            replace(self.plain, lengths=lengths[:1]),
            costs=self.costs.of_first_units(count),
            forward_only=self.forward_only,
        )

    def of_ends(self) -> _Builder | None:
        """Return the builder of the first and the last stage of every rank, where there are more.

        No unit of the stages between is cut, and no rank waits there: what pays without them pays.
        """
        placement, num_stages = self.plain.placement, self.plain.num_stages
        if placement.num_virtual <= 2:
            return None
        stages = (*range(num_stages)[: self.plain.num_ranks], *self._last_stages)
        return _Builder(
            replace(self.plain, placement=replace(placement, num_virtual=2)),
            costs=self.costs.of_stages(stages),
            forward_only=self.forward_only,
        )

    def between_ends(self, groups: Mapping[int, MspGroup]) -> dict[int, MspGroup]:
        """Return MSP groups of the first and the last stage of every rank where these stand."""
        total, num_ranks, found = self.costs.num_units, self.plain.num_ranks, {}
        for slot, group in groups.items():
            stage, unit = divmod(slot, total)
            if stage >= num_ranks:
                stage = self._last_stages[stage - num_ranks]
            found[stage * total + unit] = replace(group, slot=stage * total + unit)
        return found

    @property
    def _last_stages(self) -> range:
        return range(self.plain.num_stages)[-self.plain.num_ranks :]

    def repeated(self, groups: Mapping[int, MspGroup]) -> dict[int, MspGroup]:
        """Return MSP groups of the first sequence for every sequence."""
        count, total = len(self.plain.lengths[0]), self.costs.num_units
        found = {}
        for slot, group in groups.items():
            stage, unit = divmod(slot, count)
            for offset in self.offsets:
                there = stage * total + offset + unit
                found[there] = replace(group, slot=there)
        return found

    def choose(self, paying: Sequence[Mapping[int, MspGroup]]) -> Mapping[int, MspGroup]:
        """Return the runs of MSP groups that pay and without which the schedule is longer.

        The best runs, the best two and so on are compared, and of all runs the units nearest to
        the ends, the two nearest and so on: where messages cost much, only the first ones fill a
        bubble that is theirs. Then single runs and single MSP groups are dropped while that costs
        nothing, unless a trial, which simulates a whole step, takes long.
        """
        ranked = sorted(paying, key=self.gain, reverse=True)
        shards = sum(len(group.ranks) for run in paying for group in run.values())
        parts = min(len(ranked), _NESTED_CHOICES if shards <= _MANY_SHARDS else 2)
        sizes = {len(ranked) * part // parts for part in range(parts + 1)} if parts else {0}
        choices = [_together(ranked[:size]) for size in sorted(sizes, reverse=True)]
        # Where nothing costs anything to move, the paper's table is taken as it stands.
        if shards <= _MANY_SHARDS and (self.costs.weight_bytes.any() or self.costs.kv_bytes.any()):
            choices += self._shallow(_together(ranked))
        timed = [(self.makespan_s(self.build(choice)), n) for n, choice in enumerate(choices)]
        shortest, which = min(timed)
        chosen = choices[which]
        single = [{slot: group} for slot, group in self._by_gain(chosen)]
        for part in (*reversed(ranked), *reversed(single)):
            if not part.keys() <= chosen.keys() or len(chosen) > _TRIED_ALONE:
                continue
            without = {s: group for s, group in chosen.items() if s not in part}
            makespan = self.makespan_s(self.build(without))
            if makespan <= shortest + _TOLERANCE:
                chosen, shortest = without, min(shortest, makespan)
        return chosen

    def _shallow(self, groups: Mapping[int, MspGroup]) -> list[dict[int, MspGroup]]:
        """Return the groups of the outermost units, one deep, two deep and so on."""
        depths: dict[int, int] = {}
        for slot in groups:
            unit = slot % self.costs.num_units
            sequence = max(m for m, offset in enumerate(self.offsets) if offset <= unit)
            index, units = unit - self.offsets[sequence], len(self.plain.lengths[sequence])
            depths[slot] = min(index, units - 1 - index)
        deepest = max(depths.values(), default=0)
        tried = range(1, min(deepest, _DEPTHS_TRIED) + 1)
        return [{s: group for s, group in groups.items() if depths[s] < d} for d in tried]

    def gain(self, run: Mapping[int, MspGroup]) -> float:
        """Seconds that a run of MSP groups saves against its units on one rank."""
        seconds = self.seconds(run)
        saved = 0.0
        for slot in run:
            forward, backward = self.serial_seconds(slot)
            saved += forward - seconds[encoding.F, slot]
            if not self.forward_only:
                saved += backward - seconds[encoding.B, slot]
        return saved

    def _by_gain(self, groups: Mapping[int, MspGroup]) -> list[tuple[int, MspGroup]]:
        """MSP groups with the most seconds saved first, ties in order of their slots."""
        seconds = self.seconds(groups)

        def gain(slot: int) -> float:
            forward, backward = self.serial_seconds(slot)
            saved = forward - seconds[encoding.F, slot]
            return saved if self.forward_only else saved + backward - seconds[encoding.B, slot]

        return sorted(groups.items(), key=lambda item: (-gain(item[0]), item[0]))


def _runs(groups: Mapping[int, MspGroup]) -> list[dict[int, MspGroup]]:
    """MSP groups of consecutive units of one stage on the same ranks: what one brings, all use."""
    runs: list[dict[int, MspGroup]] = []
    for slot, group in sorted(groups.items()):
        before = runs[-1] if runs else {}
        if slot - 1 in before and before[slot - 1].ranks == group.ranks:
            before[slot] = group
        else:
            runs.append({slot: group})
    return runs


def _paying(groups: Mapping[int, MspGroup], *, builder: _Builder) -> list[dict[int, MspGroup]]:
    """Runs of MSP groups that are faster than their units on one rank, all messages included."""
    return [run for run in _runs(groups) if builder.gain(run) > _TOLERANCE]


def _together(runs: Sequence[Mapping[int, MspGroup]]) -> dict[int, MspGroup]:
    return {slot: group for run in runs for slot, group in run.items()}
