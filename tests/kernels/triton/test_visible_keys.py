"""First visible key of each query: all that the Triton kernels know of windows and documents."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.kernels.attention.reference import visible_pairs

pytest.importorskip("triton")


@st.composite
def spans(draw):
    t = draw(st.integers(1, 60))
    starts = draw(st.sets(st.integers(1, t - 1), max_size=4)) if t > 1 else set()
    c = draw(st.integers(1, t))
    return c, t, draw(st.none() | st.integers(1, t + 2)), (0, *sorted(starts))


@settings(deadline=None, max_examples=300)
@given(spans())
def test_first_keys_say_what_is_visible(span):
    from sppo.kernels.triton.visible_keys import visible_keys

    c, t, window, starts = span
    keys = visible_keys(c, t, window=window, document_starts=starts, device=torch.device("cpu"))
    key = torch.arange(keys.earliest, t) - keys.earliest
    own = torch.arange(t - c, t).unsqueeze(1) - keys.earliest
    first = torch.zeros(c, dtype=torch.int32) if keys.first_C is None else keys.first_C
    assert first.dtype == torch.int32
    assert bool((first[1:] >= first[:-1]).all())  # what the kernels' searches rely on
    expected = visible_pairs(c, t, window=window, document_starts=starts)
    assert not expected[:, : keys.earliest].any()
    assert torch.equal((key <= own) & (key >= first.unsqueeze(1)), expected[:, keys.earliest :])
    assert bool(expected[0, keys.earliest])  # no key is read for nothing


def test_without_a_bound_there_is_no_tensor():
    from sppo.kernels.triton.visible_keys import visible_keys

    device = torch.device("cpu")
    assert visible_keys(5, 9, window=9, document_starts=(0,), device=device).first_C is None
    in_one_document = visible_keys(5, 9, window=None, document_starts=(0, 3), device=device)
    assert (in_one_document.earliest, in_one_document.first_C) == (3, None)


def test_layers_of_a_span_share_one_tensor():
    from sppo.kernels.triton.visible_keys import visible_keys

    calls = [
        visible_keys(5, 9, window=2, document_starts=(0,), device=torch.device("cpu"))
        for _ in range(2)
    ]
    assert calls[0].first_C is calls[1].first_C
