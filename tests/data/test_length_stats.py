"""Statistics of document lengths: buckets, shares, and labels that count."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.data.samples import length_stats as length_stats_module
from sppo.data.samples.length_stats import length_stats
from tests.data.streams import stream_of
from tests.tiers import examples

documents = st.lists(st.integers(1, 1300), min_size=1, max_size=12)


def stats_of(lengths, *, length=None, loss_mask=None):
    return length_stats(stream_of(lengths, loss_mask=loss_mask), length=length)


@given(documents, st.integers(1, 1400))
def test_every_document_is_in_one_bucket(lengths, limit):
    stats = stats_of(lengths, length=limit)
    trained = [tokens - 1 for tokens in lengths]
    total = sum(trained)
    before = -1
    for bucket in stats.buckets:
        inside = [tokens for tokens in trained if before < tokens <= bucket.up_to]
        longer = [tokens for tokens in trained if tokens > bucket.up_to]
        assert (bucket.num_documents, bucket.num_tokens) == (len(inside), sum(inside))
        assert bucket.documents_share == pytest.approx(len(inside) / len(trained))
        assert bucket.longer_documents_share == pytest.approx(len(longer) / len(trained))
        assert bucket.tokens_share == pytest.approx(sum(inside) / max(1, total))
        assert bucket.longer_tokens_share == pytest.approx(sum(longer) / max(1, total))
        before = bucket.up_to
    assert before >= max(trained) == stats.longest == stats.length_percentiles["p100"]
    assert stats.num_tokens == stats.num_counting_labels == total
    assert limit in [bucket.up_to for bucket in stats.buckets]


@settings(max_examples=examples(30, all=100))
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=1, max_size=20))
def test_labels_that_count(masks):
    flat = [counts for mask in masks for counts in mask]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(length_stats_module, "_BLOCK_DOCUMENTS", 3)
        masked = stats_of([len(mask) for mask in masks], loss_mask=flat)
        whole = stats_of([len(mask) for mask in masks])
    assert masked.num_counting_labels == sum(sum(mask[1:]) for mask in masks)
    assert masked.num_documents_without_labels == sum(not any(mask[1:]) for mask in masks)
    assert (masked.has_loss_mask, whole.has_loss_mask) == (True, False)
    assert whole.num_counting_labels == sum(len(mask) - 1 for mask in masks)
    assert whole.num_documents_without_labels == sum(len(mask) == 1 for mask in masks)


def test_edges_of_buckets():
    def edges(longest):
        return [bucket.up_to for bucket in stats_of([longest + 1]).buckets]

    assert edges(0) == edges(10) == [10]
    assert edges(11) == [10, 50]
    assert edges(500) == [10, 50, 100, 200, 500]
    assert edges(501) == edges(1024) == [10, 50, 100, 200, 500, 1024]
    assert edges(4097)[-3:] == [2048, 4096, 8192]
