from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sppo.engine.attention.kv_store import KVStore, StoredKV
from sppo.engine.unit import TokenSpan
from tests.engine.models import tiny_model

MODEL = tiny_model("gqa, q/k-norm")  # 2 key/value heads of 6


def keys(tokens, *, value=0.0):
    return torch.full((tokens, 2, 6), value)


def unit(store, start, end, *, sequence=0, layer=0):
    return StoredKV(store, layer, sequence, TokenSpan(start, end, boundaries=(0, 10)))


def write(store, start, tokens, *, value=1.0, **where):
    k, v = keys(tokens, value=value), keys(tokens, value=-value)
    unit(store, start, start + tokens, **where).write(k, v)


@given(st.sets(st.integers(1, 9)), st.integers(0, 10))
def test_units_are_written_one_after_another_and_read_as_a_prefix(inner, elsewhere):
    store, cuts = KVStore(MODEL, dtype=torch.float32), [0, *sorted(inner), 10]
    for start, end in pairwise(cuts):
        if elsewhere != start:
            with pytest.raises(AssertionError, match=f"where {start} tokens are written"):
                write(store, elsewhere, 10 - elsewhere)
        write(store, start, end - start, value=float(start))
        k, v = unit(store, start, end).read()
        assert (k == -v).all()
        assert k[:, 0, 0].tolist() == [float(max(c for c in cuts if c <= i)) for i in range(end)]


@pytest.mark.parametrize(
    ("dtype", "narrow", "wide"), [("bfloat16", 2, 4), ("float32", 4, 4), ("float64", 8, 8)]
)
def test_bytes_are_counted_and_given_back(dtype, narrow, wide):
    store = KVStore(MODEL, dtype=getattr(torch, dtype))
    elements = 2 * 10 * 2 * 6
    write(store, 0, 10)
    assert store.held.now == elements * narrow
    dk, _ = unit(store, 0, 10).gradients()
    assert dk.element_size() == wide
    assert store.held.now == elements * (narrow + wide)
    write(store, 0, 10, sequence=1)
    store.release(0, layers=[0])
    assert store.held.now == elements * narrow
    assert store.num_sequences == 1
    assert store.held.peak == elements * (2 * narrow + wide)


def test_a_released_sequence_is_poisoned_for_debugging():
    store = KVStore(MODEL, dtype=torch.float32, poison=True)
    write(store, 0, 10)
    lent = [*unit(store, 0, 10).read(), *unit(store, 0, 10).gradients()]
    store.release(0, layers=[0])
    assert all(tensor.isnan().all() for tensor in lent)
