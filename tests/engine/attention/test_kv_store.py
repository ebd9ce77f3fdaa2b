import pytest
import torch

from sppo.engine.attention.kv_store import KVStore, StoredKV
from sppo.engine.unit import TokenSpan
from tests.engine.models import tiny_model

MODEL = tiny_model("gqa, q/k-norm")  # 2 key/value heads of 6


def keys(tokens, *, value=0.0):
    return torch.full((tokens, 2, 6), value)


@pytest.fixture
def store():
    return KVStore(MODEL, dtype=torch.float32)


def unit(store, start, end, *, sequence=0, layer=0):
    return StoredKV(store, layer, sequence, TokenSpan(start, end, length=10))


def write(store, start, tokens, *, value=1.0, **where):
    k, v = keys(tokens, value=value), keys(tokens, value=-value)
    unit(store, start, start + tokens, **where).write(k, v)


def test_prefixes_are_views_of_what_was_written(store):
    write(store, 0, 3, value=1.0)
    write(store, 3, 4, value=2.0)
    k, v = unit(store, 0, 7).read()
    assert torch.equal(k, torch.cat([keys(3, value=1.0), keys(4, value=2.0)]))
    assert torch.equal(v, -k)
    assert k.data_ptr() == unit(store, 0, 2).read()[0].data_ptr()


def test_writing_again_changes_nothing(store):
    write(store, 0, 3)
    write(store, 3, 4, value=2.0)
    before = unit(store, 0, 7).read()[0].clone()
    write(store, 0, 3)
    assert torch.equal(unit(store, 0, 7).read()[0], before)


def test_layers_and_sequences_are_apart(store):
    for layer, sequence in ((0, 0), (1, 0), (0, 1)):
        write(store, 0, 2, value=10.0 * layer + sequence, layer=layer, sequence=sequence)
    assert store.num_sequences == 2
    assert unit(store, 0, 2, layer=1).read()[0][0, 0, 0] == 10.0
    assert unit(store, 0, 2, sequence=1).read()[0][0, 0, 0] == 1.0


def test_a_gap_is_refused(store):
    write(store, 0, 3)
    with pytest.raises(AssertionError, match="forward at 4 leaves a gap after 3"):
        write(store, 4, 2)


def test_a_later_span_first_is_refused(store):
    with pytest.raises(AssertionError, match="leaves a gap after 0"):
        write(store, 3, 2)


def test_keys_not_yet_written_are_not_read(store):
    write(store, 0, 3)
    with pytest.raises(AssertionError, match="keys up to 5 are read, 3 are written"):
        unit(store, 0, 5).read()


def test_gradients_gather_from_later_spans(store):
    write(store, 0, 10)
    dk, dv = unit(store, 6, 10).gradients()
    assert dk.shape == dv.shape == (10, 2, 6)
    assert not dk.any()
    dk += 1.0
    dv += 2.0
    dk, dv = unit(store, 0, 6).gradients()
    assert dk.shape == (6, 2, 6)
    assert torch.all(dk == 1.0)
    assert torch.all(dv == 2.0)


@pytest.mark.parametrize(("start", "end"), [(0, 6), (7, 9), (0, 5)])
def test_backward_starts_at_the_end(store, start, end):
    write(store, 0, 10)
    with pytest.raises(AssertionError, match="but spans down to 10 have run"):
        unit(store, start, end).gradients()


@pytest.mark.parametrize("again", [(6, 10), (0, 5), (0, 10)])
def test_backward_descends_without_gaps(store, again):
    write(store, 0, 10)
    unit(store, 6, 10).gradients()
    with pytest.raises(AssertionError, match="but spans down to 6 have run"):
        unit(store, again[0], again[1]).gradients()


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
