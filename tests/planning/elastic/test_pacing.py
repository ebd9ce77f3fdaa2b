"""Paced ranks: they begin as many forwards as fit, in the least possible time."""

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sppo.cost.kv import kv_of_sequences
from sppo.cost.memory.walk import kv_held, walk_of
from sppo.cost.packed_sequence import PackedSequence
from sppo.cost.stages.seconds import weight_operand_bytes
from sppo.planning.elastic.levels import fastest_levels, level_choice
from sppo.planning.elastic.pacing import can_be_paced, pace_forwards
from sppo.schedule.actions import ActionKind, sequences_in_flight
from sppo.schedule.checks import validate
from sppo.schedule.simulation.simulate import simulate
from sppo.units import GIB
from tests.planning.elastic.test_levels import on_machine, place_levels, pressed, with_room
from tests.planning.elastic.test_step_plan import packed_candidates
from tests.planning.elastic.test_step_search import LARGE, planner
from tests.planning.elastic.walked_memory import schedule_of, walked_peaks
from tests.schedule.pacing import forwards_between, least_forwards, most_forwards
from tests.tiers import examples

PACED = ("sppo", "seq1f1b", "seq_zb_h1", "gpipe")


def partitions(number):
    """All ways to part so many sequences into pipelines."""
    for count in range(number):
        for cuts in combinations(range(1, number), count):
            yield [range(begin, end) for begin, end in pairwise((0, *cuts, number))]


def forwards_in_pipelines(candidate, runs):
    """Forwards begun where each rank ends a pipeline of some sequences before the next one."""
    ranks, lengths = candidate.pipeline_parallel_degree, candidate.sequence_lengths
    forwards = [[] for _ in range(ranks)]
    for run in runs:
        own = lengths[run.start : run.stop]
        most = most_forwards(candidate.schedule, num_ranks=ranks, lengths=own)
        for rank, counts in enumerate(most):
            before = len(forwards[rank])
            forwards[rank] += [before + count for count in counts]
    return tuple(map(tuple, forwards))


def small_step(sequences, *, ranks, share, host_bytes=0, copy_bytes_per_s=2.2e10):
    """A step of sequences, each some subsequences of equal length, in a share of the memory.

    Args:
        sequences: Tokens of a subsequence, and number of subsequences, of each sequence.
        ranks: Pipeline ranks.
        share: Memory of a device: 0 just lets ranks recompute everything, 1 retain everything.
        host_bytes: Host memory of a node.
        copy_bytes_per_s: Rate of copies.
    """
    planned = planner(65536, model=LARGE, hardware="a100-80g", ranks=ranks, sequence_parallel=8)
    rates = dict.fromkeys(("d2h_bytes_per_s", "h2d_bytes_per_s"), copy_bytes_per_s)
    base = on_machine(planned.base, host_memory_bytes=host_bytes, **rates)
    packed = (PackedSequence((size * count,), (size,) * count) for size, count in sequences)
    return with_room(base.with_packed(tuple(packed)), share)


@st.composite
def small_steps(draw):
    """A step of few sequences with too little memory to run freely, or just enough."""
    counts = sorted(draw(st.lists(st.integers(1, 6), min_size=2, max_size=4)), reverse=True)
    return small_step(
        [(draw(st.integers(16, 64)) * 128, count) for count in counts],
        ranks=draw(st.sampled_from([2, 4])),
        share=draw(st.floats(-0.6, 0.3)),
    )


@settings(max_examples=examples(6, all=150))
@given(small_steps())
def test_a_paced_step_is_as_fast_as_any_grouping_into_pipelines(candidate):
    """Where not everything recomputed fits at once; InfiniPipe groups sequences there.

    On four ranks, groups are up to 9 % faster for a few steps: all ranks of a group may begin all
    its forwards, while each paced rank begins fewer than the rank before it.
    """
    assume(not level_choice(candidate, offloads=False).fits)
    grouped_s = np.inf
    for runs in partitions(len(candidate.packed)):
        counts = forwards_in_pipelines(candidate, runs)
        placed = place_levels(replace(candidate, forwards_before_backward=counts))
        if placed is not None:
            grouped_s = min(grouped_s, placed.step_s)
    found = fastest_levels(candidate)
    if found is None:
        assert np.isinf(grouped_s)
        return
    assert found.step_s <= 1.1 * grouped_s


def test_a_paced_step_that_recomputes_nothing_is_compared_with_unpaced_ones():
    """With slots for copies, ranks begin so few forwards that they mostly idle."""
    candidate = small_step(
        [(4864, 6), (4992, 4), (6016, 3), (7040, 2)],
        ranks=4,
        share=0.19,
        host_bytes=64 * GIB,
        copy_bytes_per_s=2.5e10,
    )
    assert place_levels(candidate, offloads=True) is None
    unpaced = place_levels(candidate)
    assert fastest_levels(candidate).step_s <= unpaced.step_s


def test_idle_paced_ranks_recompute_without_loss():
    """So what a level adds to the time with everything retained is no bound."""
    candidate = small_step(
        [(2560, 6), (2304, 6), (5888, 2)],
        ranks=4,
        share=-0.0999,
        host_bytes=2048 * GIB,
        copy_bytes_per_s=1e10,
    )
    best_s = min(
        place_levels(candidate, offloads=offloads, paces=True).step_s for offloads in (False, True)
    )
    assert fastest_levels(candidate).step_s <= best_s


@st.composite
def paced_candidates(draw):
    """A step whose ranks begin some of their forwards later."""
    candidate = draw(packed_candidates(policies=("retain",), schedules=PACED))
    assume(can_be_paced(candidate))
    counts = forwards_between(
        candidate.schedule,
        num_ranks=candidate.pipeline_parallel_degree,
        lengths=candidate.sequence_lengths,
        share=draw(st.floats(0, 1)),
    )
    return replace(candidate, forwards_before_backward=counts)


@settings(deadline=None, max_examples=examples(30, all=600))
@given(
    st.one_of(packed_candidates(policies=("retain",)), paced_candidates()),
    st.integers(0, 2**32 - 1),
)
def test_bytes_held_are_those_of_the_program(candidate, seed):
    stages, ranks = candidate.num_stages, candidate.pipeline_parallel_degree
    schedule, walk = schedule_of(candidate), walk_of(candidate)
    validate(schedule)
    operands = weight_operand_bytes(candidate)
    random = np.random.default_rng(seed).random((3, stages, len(candidate.lengths)))
    held, forward, backward = operands + operands.max() * random
    found = walk.held(held, deferred=operands) + sum(kv_held(candidate))
    found = (found + walk.running(np.stack([forward, backward]))).max(axis=1)
    assert found == pytest.approx(walked_peaks(candidate, held, (forward, backward), schedule))
    counted = (walk.counts(held) * held).sum(axis=1).reshape(-1, ranks).sum(axis=0)
    assert counted == pytest.approx(walk.held(held).max(axis=1))
    without_backward = np.arange(len(walk.sequences_held)) < candidate.forward_only_stages
    assert np.maximum(without_backward, walk.sequences_held).tolist() == [
        sequences_in_flight(
            action
            for action in schedule.programs[stage % ranks]
            if action.stage == stage and action.kind in (ActionKind.F, ActionKind.B, ActionKind.W)
        )
        for stage in range(stages)
    ]


@settings(max_examples=examples(20, all=300))
@given(paced_candidates(), st.integers(0, 2**32 - 1), st.floats(0, 1.1))
def test_ranks_begin_as_much_as_there_is_room_for(candidate, seed, share):
    """Counted along the program: it fits where anything does, and the first rank has no room left.

    That holds for its first backward; later it may have begun less to be able to hold it. Ranks
    without a backward have room for everything.
    """
    lengths, ranks = candidate.sequence_lengths, candidate.pipeline_parallel_degree
    held, forward, backward = np.random.default_rng(seed).random(
        (3, candidate.num_stages, len(candidate.lengths))
    )
    size = sum(kv_held(candidate))[0].max()
    # A backward forms the operands that its weight half waits with.
    backward = 0.1 * size * backward + weight_operand_bytes(candidate)
    held, running = held * size, np.stack([0.1 * size * forward, backward])
    least = (least_forwards(lengths),) * ranks
    most = most_forwards(candidate.schedule, num_ranks=ranks, lengths=lengths)

    def peaks(counts):
        return np.array(
            walked_peaks(replace(candidate, forwards_before_backward=counts), held, running)
        )

    room = peaks(least) + share * np.maximum(peaks(most) - peaks(least), 0.0) + 1.0
    found = pace_forwards(
        replace(candidate, forwards_before_backward=()), held=held, running=running, room=room
    )
    begin = candidate.forward_only_stages
    assert (np.array(found) <= np.array(most))[begin:].all()
    assert (np.array(found) >= np.array(least)).all()
    assert (np.diff(np.array(found), axis=0) <= 0).all()
    assert (peaks(found) <= room).all()
    if kv_of_sequences(candidate)[2][begin:].any():
        return  # K and V of layers without a backward count longer than they live
    if (peaks(most) <= room).all():
        assert found[begin:] == most[begin:]
    first = found[begin]
    more = tuple(max(first[0] + 1, count) for count in first)
    if first[0] < most[begin][0] and all(np.array(more) <= np.array(most[begin])):
        assert peaks((*found[:begin], more, *found[begin + 1 :]))[begin] > room[begin]


def test_ranks_are_paced_where_not_even_recomputing_everything_fits():
    candidate = pressed(share=-0.1, longest=131072)
    assert place_levels(candidate) is None
    found = fastest_levels(candidate)
    assert found.candidate.forwards_before_backward
    assert found.shortfall is None
    program = found.candidate.program(found.costs)
    validate(program)
    assert simulate(program, costs=found.costs).makespan_s == pytest.approx(found.step_s)


def test_ranks_run_freely_where_recomputing_is_enough():
    assert not fastest_levels(pressed(share=0.1)).candidate.forwards_before_backward
