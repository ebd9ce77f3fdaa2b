from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.planning.partition import (
    boundaries_by_flops,
    boundaries_by_length,
    lengths_of,
)

# 24 layers, 4096 wide, 32 heads of 128, MLP 16384, vocabulary 32000, as Seq1F1B counts FLOPs.
LINEAR = 24 * (8 * 4096 * 4096 + 4 * 4096 * 16384) + 4 * 4096 * 32000
QUADRATIC = 24 * (4 * 128 + 3) * 32


def cost(x, linear=LINEAR, quadratic=QUADRATIC):
    """FLOPs of the first x tokens."""
    return linear * x + quadratic * x * x / 2


def cut(length, num_subsequences, alignment, linear=LINEAR, quadratic=QUADRATIC):
    return boundaries_by_flops(
        length,
        num_subsequences=num_subsequences,
        linear=linear,
        quadratic=quadratic,
        alignment=alignment,
    )


@pytest.mark.parametrize(
    ("length", "alignment", "lengths"),
    [
        (16384, 2, (4928, 4238, 3778, 3440)),
        (131072, 128, (34688, 21120, 16640, 14208, 12544, 11520, 10496, 9856)),
    ],
)
def test_values_worked_out_by_hand(length, alignment, lengths):
    assert lengths_of(cut(length, len(lengths), alignment)) == lengths


requests = st.tuples(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 600)).filter(
    lambda request: request[1] <= request[0]
)
costs = st.floats(0, 1e15, allow_subnormal=False)


def assert_tiles(boundaries, length, num_subsequences):
    assert len(boundaries) == num_subsequences + 1
    assert (boundaries[0], boundaries[-1]) == (0, length)
    assert all(a < b for a, b in pairwise(boundaries))
    assert all(type(b) is int for b in boundaries)


@settings(max_examples=60)
@given(requests, costs, costs)
def test_any_request_is_tiled(request, linear, quadratic):
    length, num_subsequences, alignment = request
    if linear + quadratic > 0:
        boundaries = cut(length, num_subsequences, alignment, linear, quadratic)
        assert_tiles(boundaries, length, num_subsequences)
    assert_tiles(
        boundaries_by_length(length, num_subsequences=num_subsequences, alignment=alignment),
        length,
        num_subsequences,
    )


@settings(max_examples=60)
@given(st.integers(1000, 10**7), st.integers(1, 64), st.integers(0, 9))
def test_pieces_cost_the_same_but_for_rounding(length, num_subsequences, power):
    """Each cut moves by half an alignment at most, where a token costs a + bS at most."""
    alignment = 2**power
    if length < 4 * num_subsequences * alignment:
        return
    boundaries = cut(length, num_subsequences, alignment)
    assert all(b % alignment == 0 for b in boundaries[:-1])
    slack = alignment * (LINEAR + QUADRATIC * length)
    share = cost(length) / num_subsequences
    assert all(abs(cost(b) - cost(a) - share) <= slack for a, b in pairwise(boundaries))


@settings(max_examples=60)
@given(st.integers(1, 10**6), st.integers(1, 200))
def test_equal_lengths_differ_by_one_token(length, num_subsequences):
    if num_subsequences > length:
        return
    lengths = lengths_of(boundaries_by_length(length, num_subsequences=num_subsequences))
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("length", [1, 2, 37, 4096])
def test_a_token_each(length):
    """Equal FLOPs would leave late pieces empty; they are spread over what there is."""
    assert cut(length, length, 128, 0.0, 1.0) == tuple(range(length + 1))


def test_without_attention_cost_pieces_are_equal():
    assert cut(1000, 7, 1, 5.0, 0.0) == boundaries_by_length(1000, num_subsequences=7)


def test_more_pieces_than_tokens_is_refused():
    message = "4 subsequences of a 3-token sequence.*use at most 3"
    with pytest.raises(ValueError, match=message):
        cut(3, 4, 1)
    with pytest.raises(ValueError, match=message):
        boundaries_by_length(3, num_subsequences=4)
