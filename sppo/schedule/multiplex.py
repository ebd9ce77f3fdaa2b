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

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from sppo.schedule.actions import Placement, Schedule
from sppo.schedule.costs import Costs, abstract_costs
from sppo.schedule.cut_steps import CutSteps
from sppo.schedule.encoding import encode
from sppo.schedule.event_loop import run_clock
from sppo.schedule.msp_groups import MspGroup, balanced_shards

# Up to this many MSP groups, runs and single MSP groups are dropped one by one; of more, the best
# eighths of the runs are tried; of MSP groups with so many shards that one trial takes a tenth of a
# second, all, the better half and none.
_TRIED_ALONE = 64
_NESTED_CHOICES = 8
_DEPTHS_TRIED = 8
_MANY_SHARDS = 20_000
_ENDS = 2
_TOLERANCE = 1e-9

_Run = dict[int, MspGroup]


def multiplexed_ranks(stage: int, *, unit: int, placement: Placement, num_units: int) -> range:
    """Return the ranks that run subsequence `unit` of `num_units` on `stage` (the paper's Table 3).

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
    """Return the fastest of the plain schedule and those with some units cut over idle ranks.

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
    chosen = _chosen(plain, costs=costs, forward_only=forward_only)
    steps = CutSteps(plain, costs=costs, groups=chosen, forward_only=forward_only)
    whole = run_clock(plain, programs=encode(plain), costs=costs).end_s
    return steps.program(chosen) if steps.step_s(chosen) < whole - _TOLERANCE else plain


def _chosen(plain: Schedule, *, costs: Costs, forward_only: bool) -> dict[int, MspGroup]:
    """Choose the MSP groups with which a step that runs one sequence after another is shortest.

    Sequences that are cut alike and cost the same are all served by what serves one. Of several
    stages on a rank only units of the first and of the last are cut, and no rank waits between
    them: what pays without those between pays.
    """
    count, total, placement = len(plain.lengths[0]), costs.num_units, plain.placement
    if len(plain.lengths) > 1 and len({*plain.lengths}) == 1 and costs.repeats(count):
        one = replace(plain, lengths=plain.lengths[:1])
        found = _chosen(one, costs=costs.of_first_units(count), forward_only=forward_only)
        slots = {slot: divmod(slot, count) for slot in found}
        return {
            there: replace(found[slot], slot=there)
            for slot, (stage, unit) in slots.items()
            for there in range(stage * total + unit, (stage + 1) * total, count)
        }
    if placement.num_virtual > _ENDS:
        stages = range(placement.num_stages)
        ends = (*stages[: placement.num_ranks], *stages[-placement.num_ranks :])
        two = replace(plain, placement=replace(placement, num_virtual=_ENDS))
        found = _chosen(two, costs=costs.of_stages(ends), forward_only=forward_only)
        there = {slot: ends[slot // total] * total + slot % total for slot in found}
        return {there[slot]: replace(group, slot=there[slot]) for slot, group in found.items()}
    groups = _possible_groups(plain, costs=costs)
    steps = CutSteps(plain, costs=costs, groups=groups, forward_only=forward_only)
    return _Choice(plain, costs, groups, steps).shortest()


def _possible_groups(plain: Schedule, *, costs: Costs) -> dict[int, MspGroup]:
    """Make an MSP group for every left and right unit that has a token for each shard."""
    groups = {}
    for offset, parts in zip(plain.unit_offsets(), plain.lengths, strict=True):
        starts = (0, *accumulate(parts))
        for subsequence, tokens in enumerate(parts):
            for stage in range(plain.num_stages):
                ranks = multiplexed_ranks(
                    stage, unit=subsequence, placement=plain.placement, num_units=len(parts)
                )
                if 1 < len(ranks) <= tokens:
                    slot = stage * costs.num_units + offset + subsequence
                    lengths = balanced_shards(
                        tokens,
                        num_shards=len(ranks),
                        start=starts[subsequence],
                        context_slope=costs.context_slope,
                    )
                    groups[slot] = MspGroup(slot, tuple(ranks), lengths)
    return groups


@dataclass(frozen=True, slots=True)
class _Choice:
    """A choice among MSP groups that a step may have.

    Attributes:
        plain: The step with every unit whole.
        costs: Of its actions.
        groups: All that it may have, by slot.
        steps: It with some of them.
    """

    plain: Schedule
    costs: Costs
    groups: Mapping[int, MspGroup]
    steps: CutSteps

    def shortest(self) -> dict[int, MspGroup]:
        """Return the runs of MSP groups that pay and without which the step is longer.

        The best runs, the best two and so on are compared, and of all runs the units nearest to
        the ends, the two nearest and so on: where messages cost much, only the first ones fill a
        bubble that is theirs. Then single runs and single MSP groups are dropped while that costs
        nothing, unless a trial, which walks through a whole step, takes long.
        """
        paying = [run for run in _runs(self.groups) if self._saved_s(run) > _TOLERANCE]
        ranked = self._on_few_ranges(sorted(paying, key=self._saved_s, reverse=True))
        shards = sum(len(group.ranks) for run in paying for group in run.values())
        parts = min(len(ranked), _NESTED_CHOICES if shards <= _MANY_SHARDS else 2)
        sizes = {len(ranked) * part // parts for part in range(parts + 1)} if parts else {0}
        choices = [_together(ranked[:size]) for size in sorted(sizes, reverse=True)]
        # Where nothing costs anything to move, the paper's table is taken as it stands.
        moved = self.costs.weight_bytes.any() or self.costs.kv_bytes.any()
        if shards <= _MANY_SHARDS and moved:
            choices += self._shallow(_together(ranked))
        timed = [(self.steps.step_s(choice), n) for n, choice in enumerate(choices)]
        shortest, which = min(timed)
        chosen = choices[which]
        by_saving = sorted(chosen.items(), key=lambda item: (-self.steps.saved_s(item[0]), item[0]))
        single = [{slot: group} for slot, group in by_saving]
        for part in (*reversed(ranked), *reversed(single)):
            if not part.keys() <= chosen.keys() or len(chosen) > _TRIED_ALONE:
                continue
            without = {s: group for s, group in chosen.items() if s not in part}
            step_s = self.steps.step_s(without)
            if step_s <= shortest + _TOLERANCE:
                chosen, shortest = without, min(shortest, step_s)
        return chosen

    def _on_few_ranges(self, ranked: Iterable[_Run]) -> list[_Run]:
        """Return the first of some runs that take no rank into more ranges than it may be in."""
        most, found = self.costs.links.most_ranges, []
        ranges = [set[tuple[int, ...]]() for _ in range(self.plain.num_ranks)]
        for run in ranked:
            ranks = next(iter(run.values())).ranks
            if all(len(ranges[rank] | {ranks}) <= most for rank in ranks):
                found.append(run)
                for rank in ranks:
                    ranges[rank].add(ranks)
        return found

    def _shallow(self, groups: Mapping[int, MspGroup]) -> list[dict[int, MspGroup]]:
        """Return the groups of the outermost units, one deep, two deep and so on."""
        depths = {}
        offsets = self.plain.unit_offsets()
        for slot in groups:
            unit = slot % self.costs.num_units
            sequence = bisect_right(offsets, unit) - 1
            index, units = unit - offsets[sequence], len(self.plain.lengths[sequence])
            depths[slot] = min(index, units - 1 - index)
        deepest = max(depths.values(), default=0)
        tried = range(1, min(deepest, _DEPTHS_TRIED) + 1)
        return [{s: group for s, group in groups.items() if depths[s] < d} for d in tried]

    def _saved_s(self, run: Iterable[int]) -> float:
        """Return the seconds that a run of MSP groups saves against its units on one rank."""
        return sum(map(self.steps.saved_s, run))


def _runs(groups: Mapping[int, MspGroup]) -> list[_Run]:
    """Join groups of consecutive units of a stage on the same ranks: what one brings, all use."""
    runs: list[_Run] = []
    for slot, group in sorted(groups.items()):
        before = runs[-1] if runs else {}
        if slot - 1 in before and before[slot - 1].ranks == group.ranks:
            before[slot] = group
        else:
            runs.append({slot: group})
    return runs


def _together(runs: Iterable[_Run]) -> dict[int, MspGroup]:
    return {slot: group for run in runs for slot, group in run.items()}
