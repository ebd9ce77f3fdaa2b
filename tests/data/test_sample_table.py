"""Table of samples: documents that are cut, dropped, refused or left out."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo.data.samples.sample_table import sample_table

documents = st.lists(st.integers(1, 40), min_size=1, max_size=20)


def table_of(documents, *, length, longer):
    return sample_table(np.cumsum([0, *documents]), length=length, longer=longer)


def label_positions(table):
    """Tokens of the stream that are labels, in order."""
    pairs = zip(table.starts.tolist(), table.lengths.tolist(), strict=True)
    return [p + 1 for start, length in pairs for p in range(start, start + length)]


@given(documents=documents, length=st.integers(1, 45))
def test_cut_samples_have_every_label_once(documents, length):
    table = table_of(documents, length=length, longer="cut")
    starts = list(itertools.accumulate(documents, initial=0))
    firsts = set(starts[:-1])
    assert label_positions(table) == [p for p in range(starts[-1]) if p not in firsts]
    assert all(1 <= tokens <= length for tokens in table.lengths)
    assert table.num_left_out == documents.count(1)
    assert table.num_samples == sum(-(-(tokens - 1) // length) for tokens in documents)
    for start, tokens in zip(table.starts, table.lengths, strict=True):
        assert not firsts & set(range(start + 1, start + tokens + 1)), "one document each"


@given(documents=documents, length=st.integers(1, 45))
def test_dropped_are_the_longer_ones(documents, length):
    table = table_of(documents, length=length, longer="drop")
    starts = itertools.accumulate(documents, initial=0)
    kept = [(s, n - 1) for s, n in zip(starts, documents, strict=False) if 1 < n <= length + 1]
    assert list(zip(table.starts.tolist(), table.lengths.tolist(), strict=True)) == kept
    assert table.num_left_out == len(documents) - len(kept)


@given(documents=documents, length=st.integers(1, 45))
def test_refused_where_one_is_longer(documents, length):
    longest = max(documents) - 1
    if longest <= length:
        table = table_of(documents, length=length, longer="refuse")
        whole = table_of(documents, length=length, longer="cut")
        assert table.starts.tolist() == whole.starts.tolist()
        return
    number = sum(tokens - 1 > length for tokens in documents)
    with pytest.raises(ValueError, match="^sequence.longer refuse: ") as caught:
        table_of(documents, length=length, longer="refuse")
    assert f"{number} of {len(documents)} documents are longer than sequence.length {length}, " in (
        str(caught.value)
    )
    assert f"raise sequence.length to {longest}, or" in str(caught.value)
