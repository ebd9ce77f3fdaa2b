"""Tiles cover a tensor of any shape exactly once, none larger than allowed."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.kernels import row_tiles
from sppo.kernels.attention.call import AttentionCall
from sppo.kernels.attention.choice import KERNELS
from sppo.kernels.row_tiles import accumulation_tiles
from tests.kernels.attention.reference import computed


def small_tiles(elements):
    return mock.patch.object(row_tiles, "ACCUMULATION_TILE_BYTES", 4 * elements)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_accumulation_tiles_cover_once_and_fit(shape):
    x = torch.zeros(shape)
    with small_tiles(24):
        for tile in accumulation_tiles(x):
            assert x[tile].numel() <= 24
            x[tile] += 1
    assert torch.equal(x, torch.ones(shape))


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (6, 1)])
def test_key_gradients_do_not_depend_on_the_tiles(heads, kv_heads):
    """1e-6: fp32 sums of at most six."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (
        torch.randn(40, n, 8, generator=generator).bfloat16()
        for n in (heads, kv_heads, kv_heads, heads)
    )
    call = AttentionCall(q, k, v)
    whole = computed(KERNELS["cpu_flash"], call, do)
    with small_tiles(100):  # two tokens of six heads
        tiled = computed(KERNELS["cpu_flash"], call, do)
    for name, expected in whole.items():
        torch.testing.assert_close(tiled[name], expected, rtol=1e-6, atol=1e-6)
