"""Every visible (query, key) pair lies in exactly one block, and no block hides a cost."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.cost.tiles import HALF_TOKENS, MAX_CAUSAL_TOKENS
from sppo.kernels.attention import blocks as attention_blocks
from sppo.kernels.attention.blocks import BlockKind
from tests.kernels.attention.reference import spans, visible_pairs
from tests.tiers import examples


def visible(span):
    return visible_pairs(**span).numpy().astype(int)


def pairs_of(block, num_queries, num_keys, window):
    """Pairs that a block covers by the meaning of its kind."""
    query = num_keys - num_queries + np.arange(block.q0, block.q1)[:, None]
    key = np.arange(block.k0, block.k1)[None]
    if block.kind is BlockKind.FULL:
        return np.ones((block.num_queries, block.num_keys), dtype=int)
    if block.kind is BlockKind.CAUSAL:
        return np.tril(np.ones((block.num_queries, block.num_keys), dtype=int))
    return ((key <= query) & (key > query - window)).astype(int)


def covered(blocks, num_queries, num_keys, window):
    counts = np.zeros((num_queries, num_keys), dtype=int)
    for block in blocks:
        counts[block.q0 : block.q1, block.k0 : block.k1] += pairs_of(
            block, num_queries, num_keys, window
        )
    return counts


def blocks_with(tiles, span):
    """Blocks with small limits, so that short spans reach every branch."""
    causal, band = tiles
    limits = {
        "MAX_CAUSAL_TOKENS": causal,
        "BAND_TILE_TOKENS": band,
        "MAX_FULL_KEYS": 2 * causal + 1,
    }
    with mock.patch.multiple(attention_blocks, **limits):
        return attention_blocks.attention_blocks.__wrapped__(**span)


@settings(deadline=None, max_examples=examples(150, all=400))
@given(spans(120), st.tuples(st.integers(1, 40), st.integers(1, 40)))
def test_every_visible_pair_is_covered_once(span, tiles):
    blocks = blocks_with(tiles, span)
    size = (span["num_queries"], span["num_keys"], span["window"])
    assert np.array_equal(covered(blocks, *size), visible(span))


@settings(deadline=None, max_examples=examples(80, all=200))
@given(spans(120), st.tuples(st.integers(1, 40), st.integers(1, 40)))
def test_blocks_have_the_form_their_kind_promises(span, tiles):
    for block in blocks_with(tiles, span):
        assert block.num_queries >= 1
        assert block.num_keys >= 1
        if block.kind is BlockKind.CAUSAL:
            assert block.num_queries == block.num_keys <= tiles[0]
        if block.kind is BlockKind.FULL:
            assert block.num_keys <= max(2 * tiles[0] + 1, span["num_queries"])
        if block.kind is BlockKind.BAND:
            assert block.num_queries <= tiles[1]
            assert block.num_keys <= tiles[1] + span["window"] - 1


def test_a_long_diagonal_is_mostly_full_rectangles():
    tokens = 8 * MAX_CAUSAL_TOKENS
    blocks = attention_blocks.attention_blocks(tokens, tokens)
    full = sum(b.num_queries * b.num_keys for b in blocks if b.kind is BlockKind.FULL)
    assert full / (tokens * (tokens + 1) / 2) > 0.85  # 7/8 of the area


@pytest.mark.parametrize("tokens", [2304, 6016, 3 * MAX_CAUSAL_TOKENS + 128])
def test_squares_are_halved_so_that_only_the_end_of_a_span_remains(tokens):
    multiple = HALF_TOKENS
    blocks = attention_blocks.attention_blocks(tokens, tokens)
    parts = attention_blocks.cut_to_token_multiples(blocks, multiple, window=None)
    whole_tokens = tokens - tokens % multiple
    remaining = [b for b in parts if b.num_queries % multiple or b.num_keys % multiple]
    assert all(block.q1 > whole_tokens for block in remaining)
    assert len(remaining) <= tokens // multiple + 1


def test_a_window_wider_than_the_document_needs_no_mask():
    kinds = {b.kind for b in attention_blocks.attention_blocks(50, 80, window=80)}
    assert kinds == {BlockKind.FULL, BlockKind.CAUSAL}
    assert BlockKind.BAND in {b.kind for b in attention_blocks.attention_blocks(50, 80, window=79)}


@settings(deadline=None, max_examples=examples(100, all=300))
@given(spans(120), st.tuples(st.integers(1, 40), st.integers(1, 40)), st.integers(1, 30))
def test_token_multiples_cover_the_same_pairs(span, tiles, multiple):
    """Beside the bands, what is not a multiple is small."""
    blocks = blocks_with(tiles, span)
    size = (span["num_queries"], span["num_keys"], span["window"])
    with mock.patch.object(attention_blocks, "MAX_REMAINDER_TOKENS", 7):
        parts = attention_blocks.cut_to_token_multiples.__wrapped__(
            blocks, multiple, window=span["window"]
        )
    assert np.array_equal(covered(parts, *size), visible(span))
    for part in parts:
        whole = part.num_queries % multiple == part.num_keys % multiple == 0
        if part.kind is BlockKind.FULL:
            assert whole or max(part.num_queries, part.num_keys) <= 7
        if part.kind is BlockKind.CAUSAL:
            assert part.num_queries == part.num_keys
            assert whole or part.num_queries < multiple
        assert part.k0 >= 0


def test_a_band_that_its_window_ends_begins_earlier():
    blocks = attention_blocks.attention_blocks(2048, 8192, window=1000)
    assert {b.kind for b in blocks} == {BlockKind.BAND}
    parts = attention_blocks.cut_to_token_multiples(blocks, 256, window=1000)
    assert {part.num_keys % 256 for part in parts} == {0}
