"""Gradients of a span of queries, in the layout that the projections read."""

import pytest
import torch

from sppo.engine.attention.kv_store import KVStore, StoredKV
from sppo.engine.attention.prefix_attention import PrefixAttention
from sppo.engine.unit import Run, TokenSpan
from tests.engine.attention.test_kv_store import MODEL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_keys_lie_by_token(dtype):
    """Each is read twice as a matrix: by head, it would be copied for both."""
    store = KVStore(MODEL, dtype=dtype)
    q, k, v = (
        torch.randn(6, heads, MODEL.head_dim).to(dtype)
        for heads in (MODEL.num_heads, MODEL.kv_heads, MODEL.kv_heads)
    )
    whole = TokenSpan(start=0, end=6, boundaries=(0, 6))
    kv = StoredKV(store, layer=0, sequence=0, span=whole)
    attention = PrefixAttention(kv, runs=(Run(0, 6),))
    o, lse = attention.forward(q, k, v)
    _dq, dk, dv = attention.backward(torch.ones_like(o), q, o, lse)
    for gradient in (dk, dv):
        assert gradient.dtype is dtype
        assert gradient.is_contiguous()
