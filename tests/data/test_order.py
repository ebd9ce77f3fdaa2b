"""The order of training sequences is a permutation per epoch and never changes."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sppo.data.order import SequenceOrder


def _epoch(order: SequenceOrder, epoch: int) -> list[int]:
    first = epoch * order.num_sequences
    return [order.sequence_index(first + rank) for rank in range(order.num_sequences)]


@given(
    num_sequences=st.integers(1, 300),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 10**6),
    shuffle=st.booleans(),
)
def test_each_epoch_reads_every_sequence_once(
    num_sequences: int, seed: int, epoch: int, shuffle: bool
) -> None:
    order = SequenceOrder(num_sequences, seed=seed, shuffle=shuffle)
    assert sorted(_epoch(order, epoch)) == list(range(num_sequences))
    assert order.epoch_of(epoch * num_sequences) == epoch
    assert order.epoch_of((epoch + 1) * num_sequences - 1) == epoch


def test_unshuffled_order_counts_up_and_wraps() -> None:
    order = SequenceOrder(3, seed=9, shuffle=False)
    assert [order.sequence_index(position) for position in range(8)] == [0, 1, 2, 0, 1, 2, 0, 1]


def test_epochs_and_seeds_differ() -> None:
    order = SequenceOrder(100, seed=1, shuffle=True)
    assert _epoch(order, 0) != _epoch(order, 1)
    assert _epoch(order, 0) != _epoch(SequenceOrder(100, seed=2, shuffle=True), 0)
    assert _epoch(order, 0) != list(range(100))


@given(st.integers(1, 70), st.integers(0, 300), st.integers(0, 80), st.booleans())
def test_many_at_once_are_those_one_by_one(
    num_sequences: int, position: int, count: int, shuffle: bool
) -> None:
    order = SequenceOrder(num_sequences, seed=4, shuffle=shuffle)
    found = order.sequence_indices(position, count)
    assert found.dtype == np.int64
    assert found.tolist() == [order.sequence_index(position + k) for k in range(count)]


def test_order_is_pinned() -> None:
    """A change here would make resumed runs read other data than they would have."""
    order = SequenceOrder(10, seed=0, shuffle=True)
    assert _epoch(order, 0) == [2, 8, 5, 1, 6, 3, 0, 4, 9, 7]
    assert _epoch(order, 1) == [3, 6, 9, 5, 2, 4, 7, 1, 0, 8]


def test_all_orders_of_few_sequences_are_about_equally_likely() -> None:
    num_epochs = 1200
    order = SequenceOrder(3, seed=5, shuffle=True)
    counts = Counter(tuple(_epoch(order, epoch)) for epoch in range(num_epochs))
    # 200 expected of each of the 6; the standard deviation is 13.
    assert len(counts) == 6
    assert all(150 <= count <= 250 for count in counts.values()), counts


def test_far_apart_positions_of_a_huge_data_set_need_no_table() -> None:
    order = SequenceOrder(10**12 + 39, seed=3, shuffle=True)
    drawn = [order.sequence_index(position) for position in range(0, 10**14, 10**12 // 2 + 1)]
    assert all(0 <= index < order.num_sequences for index in drawn)
    # Uniform draws: half of them in each half of the data, within 4 standard deviations.
    below = sum(index < order.num_sequences // 2 for index in drawn)
    assert abs(below - len(drawn) / 2) <= 2 * len(drawn) ** 0.5
