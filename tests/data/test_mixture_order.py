"""The order of a mixture: exact shares in every block, epochs of each source, no other state."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.data.mixture_order import MixtureOrder, draws_of_block, seed_of_source
from sppo.data.order import SequenceOrder
from tests.tiers import examples

weights = st.lists(st.integers(1, 60), min_size=1, max_size=5)


def order_of(counts, *, names="abcde", shares=None, seed=3, shuffle=True):
    """Order of sources with so many samples each, and with equal shares unless told otherwise."""
    draws = draws_of_block(list(map(Fraction, shares or [1] * len(counts))))
    orders = tuple(
        SequenceOrder(count, seed=seed_of_source(seed, name), shuffle=shuffle)
        for name, count in zip(names, counts, strict=False)
    )
    return MixtureOrder(orders, draws, seed=seed)


def sources_of(order, samples):
    ends = np.cumsum([source.num_sequences for source in order.sources])
    return np.searchsorted(ends, samples, side="right")


def of_source(order, source, position, count):
    """Samples of one source among those at some positions, numbered within the source."""
    samples = order.sequence_indices(position, count)
    first = sum(one.num_sequences for one in order.sources[:source])
    return (samples[sources_of(order, samples) == source] - first).tolist()


@settings(max_examples=examples(20, all=400))
@given(shares=weights, block=st.integers(0, 10**6), seed=st.integers(0, 2**40))
def test_shares_are_exact_in_every_block(shares, block, seed):
    order = order_of([7] * len(shares), shares=shares, seed=seed)
    size = sum(order.draws)
    drawn = sources_of(order, order.sequence_indices(block * size, size))
    assert tuple(np.bincount(drawn, minlength=len(shares)).tolist()) == order.draws
    for share, draws in zip(shares, order.draws, strict=True):
        assert abs(draws - size * share / sum(shares)) < 1


@settings(max_examples=examples(40, all=400))
@given(st.lists(st.fractions(Fraction(1, 10**7), 1000), min_size=1, max_size=20))
def test_every_source_is_drawn_in_the_smallest_block_that_has_room(shares):
    draws, size = draws_of_block(shares), sum(draws_of_block(shares))
    assert size in [1024 << power for power in range(7)]
    for share, number in zip(shares, draws, strict=True):
        assert abs(number - size * share / sum(shares)) < 1
    if size > 1024:
        assert any(size // 2 * share / sum(shares) < 1 for share in shares)
    if not all(draws):
        assert size == 1 << 16


def test_shares_go_to_the_largest_remainder():
    assert draws_of_block([Fraction(1), Fraction(1), Fraction(1)]) == (342, 341, 341)
    assert draws_of_block([Fraction(1), Fraction(9999)]) == (1, 8191)
    assert draws_of_block([Fraction(1, 10**6), Fraction(1)])[0] == 0


@settings(max_examples=examples(12, all=200))
@given(st.lists(st.integers(1, 90), min_size=1, max_size=4), weights, st.booleans())
def test_every_epoch_of_a_source_has_each_sample_once(counts, shares, shuffle):
    shares = (shares * len(counts))[: len(counts)]
    order = order_of(counts, shares=shares, shuffle=shuffle)
    total = 3 * sum(order.draws)
    drawn = order.draws_before(total)
    for source, count in enumerate(counts):
        read = of_source(order, source, 0, total)
        assert len(read) == drawn[source]
        for epoch in range(len(read) // count):
            own = read[epoch * count : (epoch + 1) * count]
            assert sorted(own) == list(range(count))
            assert shuffle or own == sorted(own)


@settings(max_examples=examples(20, all=400))
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(0, 5000),
    st.lists(st.integers(0, 700), min_size=1, max_size=5),
)
def test_any_division_into_reads_is_the_same(counts, position, reads):
    """So it is the same for steps of any size, and for a run resumed at any step."""
    order = order_of(counts)
    whole = order.sequence_indices(position, sum(reads)).tolist()
    parts = []
    for count in reads:
        parts += order.sequence_indices(position + len(parts), count).tolist()
    assert parts == whole
    before, after = order.draws_before(position), order.draws_before(position + sum(reads))
    drawn = np.bincount(sources_of(order, np.array(whole, int)), minlength=len(counts))
    assert [b - a for a, b in zip(before, after, strict=True)] == drawn.tolist()


@settings(max_examples=examples(10, all=100))
@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 90))
def test_a_source_added_or_renamed_does_not_reorder_the_others(a, b, c):
    both, renamed = order_of([a, b], names="ab"), order_of([a, b], names="az")
    three = order_of([a, b, c], names="abc", shares=[2, 1, 1])
    assert both.draws == renamed.draws
    assert of_source(both, 0, 0, 600) == of_source(renamed, 0, 0, 600)
    for source in range(2):
        few, more = (of_source(order, source, 0, 500) for order in (both, three))
        common = min(len(few), len(more))
        assert few[:common] == more[:common]


def test_names_and_seeds_give_other_orders():
    first = of_source(order_of([50]), 0, 0, 50)
    assert first != of_source(order_of([50], names="b"), 0, 0, 50)
    assert first != of_source(order_of([50], seed=4), 0, 0, 50)


@settings(max_examples=examples(15, all=100))
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=3))
def test_covering_positions_have_every_sample(counts):
    order = order_of(counts)
    read = Counter(order.sequence_indices(0, order.covering).tolist())
    assert len(read) == sum(counts)


def test_order_is_pinned():
    """A change here would make resumed runs read other data than they would have."""
    order = order_of([10, 4], shares=[3, 1], seed=0)
    assert order.draws == (768, 256)
    first = [1, 3, 7, 13, 9, 4, 0, 10, 12, 6, 5, 2, 8, 11, 7, 1]
    assert order.sequence_indices(0, 16).tolist() == first
    assert order.sequence_indices(1020, 8).tolist() == [1, 13, 12, 2, 4, 3, 5, 8]


@pytest.mark.parametrize("position", [0, 1023, 1024, 10**12])
def test_a_position_far_out_is_as_quick_as_the_first(position):
    assert len(order_of([10**9, 3]).sequence_indices(position, 4)) == 4
