"""Tapering: samples whole and once, smaller subsequences at the ends, faster steps."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.data.samples.length_distributions import draw
from sppo.planning.elastic import packing_search
from sppo.planning.elastic.packing import PADDING, packed_sequence
from sppo.planning.elastic.tapering import TAPERS, Taper, taper_ends
from tests.planning.elastic.test_packing import packings, placed
from tests.planning.elastic.test_step_search import planner, samples_of
from tests.tiers import examples


@settings(max_examples=examples(100, all=1000))
@given(packings(), st.sampled_from(TAPERS), st.sampled_from([1, 1, 128]))
def test_every_sample_stays_whole_and_once(packing, taper, multiple):
    lengths, packed, _, degree = packing
    tapered = taper_ends(packed, lengths, taper=taper, least_tokens=degree, multiple=multiple)
    if tapered is None:
        return
    whole = sorted(pair for pair in placed(tapered) if pair[0] != PADDING)
    assert whole == list(enumerate(lengths))
    assert all(min(sequence.lengths) >= degree for sequence in tapered.sequences)
    ends = len(taper.first), len(tapered.sequences) - len(taper.last)
    kept = tapered.sequences[ends[0] : ends[1]]
    assert len(kept) == len(packed.sequences) - taper.replaced
    rest = iter(packed.sequences)
    assert all(sequence in rest for sequence in kept), "in the order of before"
    for place in (*range(ends[0]), *range(ends[1], len(tapered.sequences))):
        sequence, samples = tapered.sequences[place], tapered.samples[place]
        assert len(sequence.lengths) == 1
        assert sequence.tokens % multiple == 0
        assert sum(sample == PADDING for sample in samples) <= 1
        assert all(
            tokens < multiple
            for sample, tokens in zip(samples, sequence.samples, strict=True)
            if sample == PADDING
        )


def packed_alone(lengths, groups):
    found = [packed_sequence(group, lengths) for group in groups]
    sequences, samples = zip(*found, strict=True)
    return packing_search.PackedSamples(sequences, samples)


def test_sizes_are_those_of_the_taper():
    lengths = [1] * 400
    packed = packed_alone(lengths, [range(200), range(200, 400)])
    found = taper_ends(packed, lengths, taper=Taper(2, (1, 2), (3, 2)))
    assert [sequence.tokens for sequence in found.sequences] == [50, 100, 150, 100]


def test_the_sequences_of_most_samples_are_divided():
    lengths = [30, 1, 1, 1, 15, 15]
    packed = packed_alone(lengths, [[0], [1, 2, 3], [4, 5]])
    found = taper_ends(packed, lengths, taper=Taper(1, (1,), (2,)))
    assert found.samples == ((2,), (0,), (4, 5), (1, 3))


@pytest.mark.parametrize(
    ("groups", "least"),
    [([[0, 1]], 1), ([[0], [1]], 1), ([[0, 1, 2], [3, 4]], 4)],
    ids=["one sequence", "one sample each", "too few tokens"],
)
def test_what_cannot_be_divided_stays(groups, least):
    lengths = [2] * 5
    packed = packed_alone(lengths, groups)
    taper = Taper(2, (1,), (2, 1))
    assert taper_ends(packed, lengths, taper=taper, least_tokens=least) is None


def test_tapers_of_a_planner_have_its_least_tokens_and_padding():
    planned = planner(4096, ranks=2, sequence_parallel=8)
    workload = replace(planned.base.workload, dtype="bf16")
    search = planned.with_base(replace(planned.base, workload=workload)).packing_search
    lengths = [90] * 40 + [3] * 4
    packed = packed_alone(lengths, [range(40), range(40, 44)])
    assert search.multiple == 128
    tapered = [packing.packed for packing in search.tapered(packed, lengths)]
    assert tapered
    ends = [one.sequences[-1].tokens for one in tapered]
    assert all(tokens % 128 == 0 for tokens in ends)
    few = packed_alone([1] * 4, [range(4)])
    assert not search.tapered(few, [1] * 4), "eight ranks share every subsequence"


@pytest.mark.parametrize("defers_weights", [False, True])
@pytest.mark.parametrize(("ranks", "seed"), [(2, 39319), (4, 360140), (2, 5), (8, 6)])
def test_no_step_is_slower_with_tapers(ranks, seed, defers_weights, monkeypatch):
    planned = replace(planner(4096, ranks=ranks), defers_weights=defers_weights)
    lengths = draw("magi", 8, seed=seed, scale=1 / 16, longest=4096)
    tapered = planned.plan(lengths)
    monkeypatch.setattr(packing_search, "TAPERS", ())
    assert tapered.step_s <= planned.plan(lengths).step_s


@pytest.mark.parametrize("ranks", [4, 8])
def test_tapered_steps_are_faster(ranks, monkeypatch):
    lengths = draw("magi", 256, seed=1, scale=1 / 16, longest=12288)
    tapered = planner(12288, ranks=ranks).plan(lengths)
    monkeypatch.setattr(packing_search, "TAPERS", ())
    without = planner(12288, ranks=ranks).plan(lengths)
    assert samples_of(tapered) == samples_of(without)
    assert tapered.step_s < 0.995 * without.step_s
    tokens = [sequence.lengths for sequence in tapered.sequences]
    shrinking = [max(one) for one in tokens[-2:]]
    assert all(one > other for one, other in pairwise(shrinking))
