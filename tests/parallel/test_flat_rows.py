"""Flat rows: what the intervals of ranks have of parameters, and the buckets of a reduction."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sppo.checkpoint.state_block import blocks_of_interval
from sppo.cost.sharding.collectives import REDUCE_BUCKETS
from sppo.parallel import row_messages
from sppo.parallel.flat_row import FlatRow
from sppo.parallel.row_messages import RowBuckets

ROWS, COLUMNS, RANKS = 64, 4, 2
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@given(st.lists(SIZES, min_size=1, max_size=4), st.integers(1, 5))
def test_intervals_of_ranks_are_blocks_that_tile_each_parameter(sizes, ranks):
    """So a checkpoint of any ranks has every element once, at its place."""
    shapes = {f"w{i}.{'weight' if i % 2 else 'bias'}": shape for i, shape in enumerate(sizes)}
    row = FlatRow(shapes, ranks=ranks)
    flat = torch.arange(row.padded_elements)
    wholes = row.views(flat)
    assert [*wholes] == sorted(shapes, key=lambda name: name.endswith("bias"))
    found = {name: torch.full(shape, -1) for name, shape in shapes.items()}
    for rank in range(ranks):
        own = FlatRow(shapes, ranks=ranks, rank=rank).own
        for part in row.parts(own):
            shape = shapes[part.name]
            blocks = blocks_of_interval(
                flat[own][part.within],
                begin=part.elements.start,
                shape=shape,
                offsets=(0,) * len(shape),
                global_shape=shape,
            )
            assert len(blocks) <= 2 * len(shape) - 1
            for block in blocks:
                places = zip(block.offsets, block.tensor.shape, strict=True)
                place = found[part.name][tuple(slice(at, at + size) for at, size in places)]
                assert (place == -1).all()
                place.copy_(block.tensor)
    for name, whole in wholes.items():
        assert torch.equal(found[name], whole)


@pytest.mark.parametrize("shards_state", [True, False])
def test_all_but_the_last_buckets_are_waited_for_where_they_begin(monkeypatch, shards_state):
    """So the planner lets compute behind REDUCE wait for them."""
    begun, awaited = [], []

    def begin(*tensors, **_):
        number = len(begun)
        begun.append(number)
        return SimpleNamespace(wait=lambda: awaited.append(number))

    monkeypatch.setattr(row_messages, "reduce_scatter", begin)
    monkeypatch.setattr(row_messages.dist, "all_reduce", begin)
    buckets = RowBuckets(
        SimpleNamespace(rank=lambda: 0, size=lambda: RANKS),
        shards_state=shards_state,
        bucket_bytes=8 * COLUMNS * 4,
        device=torch.device("cpu"),
    )
    buckets.reduce(torch.ones(ROWS * COLUMNS))
    assert begun == [*range(ROWS // 8)]
    assert awaited == begun[:-REDUCE_BUCKETS]
    buckets.wait()
    assert awaited == begun
