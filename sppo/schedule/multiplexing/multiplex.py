"""Multiplexed sequence partitioning (MSP), which fills the bubbles at both ends of a pipeline.

The first subsequences enter a pipeline whose later ranks have nothing to do yet, and the last
subsequences leave a pipeline whose earlier ranks have nothing left to do. MSP cuts these units once
more, in space, over the ranks that would idle (SPPO paper, section 6, Table 3). For stage i of P:

* left units {0 .. P-2-i} run on ranks {i .. P-1};
* steady units {P-1-i .. N-1-i} run on rank i alone;
* right units {N-i .. N-1} run on ranks {0 .. i}.

Backward is the mirror image, on the same ranks, because they hold the activations. With unit costs
and free messages P=4, N=8 takes 8 1/3 forward units instead of 11.

Ranks with several stages that run breadth first (`looped_bfs`) idle before the first units of their
first stages and after the last units of their last stages: these are the left and the right units,
and all units between run as before.

Cutting a unit costs transfers of weights, K/V and gradients (`msp_costs.msp_seconds`), so a unit
is cut only if that pays. The choice is made per run of units (consecutive units of a stage on the
same ranks): a run is cut if it saves more time than it costs and if the step is longer without it.
If no run pays, the schedule is the plain program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import accumulate

from sppo.schedule.actions import Placement
from sppo.schedule.costs import Costs, abstract_costs
from sppo.schedule.msp_groups import MspGroup, balanced_shards
from sppo.schedule.multiplexing.cut_steps import CutSteps
from sppo.schedule.schedule import Schedule
from sppo.schedule.simulation.simulate import simulate

# Up to _TRIED_ALONE MSP groups, runs and single MSP groups are dropped one by one. The runs are
# tried in nested choices: the best eighth, two eighths and so on; above _MANY_SHARDS shards, where
# one trial takes a tenth of a second, only all runs, the better half and none.
_TRIED_ALONE = 64
_NESTED_CHOICES = 8
_DEPTHS_TRIED = 8
_MANY_SHARDS = 20_000
_ENDS = 2
_TOLERANCE = 1e-9

_Run = dict[int, MspGroup]


def multiplexed_ranks(stage: int, *, unit: int, placement: Placement, num_units: int) -> range:
    """Return the ranks that run subsequence `unit` of `num_units` on `stage` (the paper's Table 3).

    If ranks have several stages, they idle while their first stage waits for the first units, and
    after the last units of their last stage. If a sequence has fewer subsequences than there are
    ranks, a unit can be both left and right; left wins, because its bubble comes first.
    """
    num_ranks, rank = placement.num_ranks, placement.rank_of(stage)
    if stage < num_ranks and unit <= num_ranks - 2 - rank:
        return range(rank, num_ranks)
    if stage >= placement.num_stages - num_ranks and unit >= num_units - rank:
        return range(rank + 1)
    return range(rank, rank + 1)


def multiplex(plain: Schedule, *, costs: Costs | None = None) -> Schedule:
    """Return the fastest of the plain schedule and the schedules with units cut over idle ranks.

    In the schedules with cut units, sequences run one after another, each almost without a bubble;
    if that is slower than overlapping the sequences, the plain schedule is returned.

    Args:
        plain: Schedule with every unit on the rank of its stage; breadth first if ranks have
            several stages.
        costs: Costs that decide which units are cut; equal units and free messages if not given.
    """
    costs = costs or abstract_costs(plain.num_stages, num_units=plain.num_units)
    forward_only = plain.forward_only_stages
    chosen = _chosen(plain, costs=costs, forward_only_stages=forward_only)
    steps = CutSteps(plain, costs=costs, groups=chosen, forward_only_stages=forward_only)
    whole = simulate(plain, costs=costs).makespan_s
    return steps.program(chosen) if steps.step_s(chosen) < whole - _TOLERANCE else plain


def _chosen(plain: Schedule, *, costs: Costs, forward_only_stages: int) -> dict[int, MspGroup]:
    """Return the MSP groups of the shortest step that runs one sequence after another.

    If all sequences are cut alike and cost the same, the choice for one sequence is used for all.
    With several stages per rank, only units of the first and the last stage are cut, and no rank
    waits between them, so the choice is made without the stages between.
    """
    count, total, placement = len(plain.lengths[0]), costs.num_units, plain.placement
    if len(plain.lengths) > 1 and len({*plain.lengths}) == 1 and costs.repeats(count):
        one = Schedule(plain.name, placement, plain.lengths[:1], plain.columns)
        found = _chosen(
            one, costs=costs.of_first_units(count), forward_only_stages=forward_only_stages
        )
        firsts = range(0, total, count)
        return {
            slot // count * total + first + slot % count: group
            for slot, group in found.items()
            for first in firsts
        }
    if placement.num_virtual > _ENDS:
        stages = range(placement.num_stages)
        ends = (*stages[: placement.num_ranks], *stages[-placement.num_ranks :])
        both_ends = replace(placement, num_virtual=_ENDS)
        two = Schedule(plain.name, both_ends, plain.lengths, plain.columns)
        forward_only = sum(stage < forward_only_stages for stage in ends)
        found = _chosen(two, costs=costs.of_stages(ends), forward_only_stages=forward_only)
        return {ends[slot // total] * total + slot % total: own for slot, own in found.items()}
    groups = _possible_groups(plain, costs=costs)
    steps = CutSteps(plain, costs=costs, groups=groups, forward_only_stages=forward_only_stages)
    return _shortest(steps)


def _possible_groups(plain: Schedule, *, costs: Costs) -> dict[int, MspGroup]:
    """Return an MSP group for every left and right unit that has a token for each shard."""
    groups = {}
    for offset, parts in zip(plain.unit_offsets, plain.lengths, strict=True):
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
                    groups[slot] = MspGroup(tuple(ranks), lengths)
    return groups


def _shortest(steps: CutSteps) -> dict[int, MspGroup]:
    """Return the runs of MSP groups that pay and without which the step is longer.

    Choices compared: the best runs, in nested sets; and of all runs the units nearest to the ends,
    the two nearest and so on, because with expensive messages only the outermost units fill a
    bubble. Then single runs and single MSP groups are dropped if the step gets no longer, unless
    there are too many groups to try each one.

    Args:
        steps: Steps with some of the MSP groups that the step may have.
    """

    def saved_s(run: Iterable[int]) -> float:
        return sum(map(steps.saved_s, run))

    paying = [run for run in _runs(steps.groups) if saved_s(run) > _TOLERANCE]
    ranked = _on_few_ranges(sorted(paying, key=saved_s, reverse=True), costs=steps.costs)
    shards = sum(len(group.ranks) for run in paying for group in run.values())
    parts = min(len(ranked), _NESTED_CHOICES if shards <= _MANY_SHARDS else 2)
    sizes = {len(ranked) * part // parts for part in range(parts + 1)} if parts else {0}
    choices = [_together(ranked[:size]) for size in sorted(sizes, reverse=True)]
    # If transfers of weights and K/V are free, the paper's table is used unchanged.
    moved = steps.costs.weight_bytes.any() or steps.costs.kv_bytes.any()
    if shards <= _MANY_SHARDS and moved:
        choices += _shallow(_together(ranked), plain=steps.plain)
    timed = [(steps.step_s(choice), n) for n, choice in enumerate(choices)]
    shortest, which = min(timed)
    chosen = choices[which]
    by_saving = sorted(chosen.items(), key=lambda item: (-steps.saved_s(item[0]), item[0]))
    single = [{slot: group} for slot, group in by_saving]
    for part in (*reversed(ranked), *reversed(single)):
        if not part.keys() <= chosen.keys() or len(chosen) > _TRIED_ALONE:
            continue
        without = {s: group for s, group in chosen.items() if s not in part}
        step_s = steps.step_s(without)
        if step_s <= shortest + _TOLERANCE:
            chosen, shortest = without, min(shortest, step_s)
    return chosen


def _on_few_ranges(ranked: Iterable[_Run], *, costs: Costs) -> list[_Run]:
    """Return the first of the ranked runs that keep every rank within `most_ranges` ranges."""
    ranges: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    found = []
    for run in ranked:
        ranks = next(iter(run.values())).ranks
        if all(len(ranges[rank] | {ranks}) <= costs.links.most_ranges for rank in ranks):
            found.append(run)
            for rank in ranks:
                ranges[rank].add(ranks)
    return found


def _shallow(groups: Mapping[int, MspGroup], *, plain: Schedule) -> list[dict[int, MspGroup]]:
    """Return the groups of each sequence's outermost units, for depths of 1, 2 and so on."""
    counts = map(len, plain.lengths)
    of_units = [min(index, count - 1 - index) for count in counts for index in range(count)]
    depths = {slot: of_units[slot % plain.num_units] for slot in groups}
    tried = range(1, min(max(depths.values(), default=0), _DEPTHS_TRIED) + 1)
    return [{s: group for s, group in groups.items() if depths[s] < d} for d in tried]


def _runs(groups: Mapping[int, MspGroup]) -> list[_Run]:
    """Join the groups of consecutive units of a stage that run on the same ranks."""
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
