"""Buckets of gradients: the number of buckets that a rank waits for when it reduces a stage."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sppo.cost.sharding.collectives import REDUCE_BUCKETS
from sppo.parallel import data_parallel
from sppo.parallel.data_parallel import GradientReducer

ROWS, COLUMNS, RANKS = 64, 4, 2


@pytest.mark.parametrize("shards_state", [True, False])
def test_all_but_the_last_buckets_are_waited_for_where_they_begin(monkeypatch, shards_state):
    """So the planner lets compute behind REDUCE wait for them."""
    begun, awaited = [], []

    def begin(*tensors, **_):
        number = len(begun)
        begun.append(number)
        return SimpleNamespace(wait=lambda: awaited.append(number))

    monkeypatch.setattr(data_parallel, "reduce_scatter", begin)
    monkeypatch.setattr(data_parallel.dist, "all_reduce", begin)
    reducer = GradientReducer(
        SimpleNamespace(rank=lambda: 0, size=lambda: RANKS),
        shapes={"w": (ROWS, COLUMNS)},
        shards_state=shards_state,
        bucket_bytes=8 * COLUMNS * 4,
    )
    reducer.reduce({"w": torch.ones(ROWS, COLUMNS)}, ["w"])
    assert begun == [*range(ROWS // 8)]
    assert awaited == begun[:-REDUCE_BUCKETS]
    reducer.wait()
    assert awaited == begun
