"""The order of training sequences is a permutation per epoch and never changes."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sppo.data.order import SequenceOrder


def _epoch(order, epoch):
    found = order.sequence_indices(epoch * order.num_sequences, order.num_sequences)
    assert found.dtype == np.int64
    return list(found.tolist())


@given(
    num_sequences=st.integers(1, 300),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 10**6),
    shuffle=st.booleans(),
)
def test_each_epoch_reads_every_sequence_once(num_sequences, seed, epoch, shuffle):
    order = SequenceOrder(num_sequences, seed=seed, shuffle=shuffle)
    assert sorted(_epoch(order, epoch)) == list(range(num_sequences))


def test_unshuffled_order_counts_up_and_wraps():
    order = SequenceOrder(3, seed=9, shuffle=False)
    assert order.sequence_indices(0, 8).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_epochs_and_seeds_differ():
    order = SequenceOrder(100, seed=1, shuffle=True)
    assert _epoch(order, 0) != _epoch(order, 1)
    assert _epoch(order, 0) != _epoch(SequenceOrder(100, seed=2, shuffle=True), 0)
    assert _epoch(order, 0) != list(range(100))


@given(st.integers(1, 70), st.integers(0, 300), st.integers(0, 80), st.booleans())
def test_many_at_once_are_those_one_by_one(num_sequences, position, count, shuffle):
    order = SequenceOrder(num_sequences, seed=4, shuffle=shuffle)
    one_by_one = [order.sequence_indices(position + k, 1).item() for k in range(count)]
    assert order.sequence_indices(position, count).tolist() == one_by_one


def test_order_is_pinned():
    """A change here would make resumed runs read other data than they would have."""
    order = SequenceOrder(10, seed=0, shuffle=True)
    assert _epoch(order, 0) == [2, 8, 5, 1, 6, 3, 0, 4, 9, 7]
    assert _epoch(order, 1) == [3, 6, 9, 5, 2, 4, 7, 1, 0, 8]


def test_all_orders_of_few_sequences_are_about_equally_likely():
    num_epochs = 600
    order = SequenceOrder(3, seed=5, shuffle=True)
    counts = Counter(tuple(_epoch(order, epoch)) for epoch in range(num_epochs))
    # 100 expected of each of the 6; the standard deviation is 9.
    assert len(counts) == 6
    assert all(64 <= count <= 136 for count in counts.values()), counts
