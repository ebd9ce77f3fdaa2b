"""Tiled projection and loss against torch's cross entropy; at most one tile of logits at a time."""

import weakref
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from sppo.cost import tiles
from sppo.cost.tiles import tile_tokens
from sppo.kernels import cross_entropy
from sppo.kernels.cross_entropy import (
    CROSS_ENTROPY,
    LossTerms,
    linear_cross_entropy,
    linear_cross_entropy_with_gradient,
)
from sppo.units import MIB
from tests.kernels.allocations import peak_bytes


def problem(c, e, v, *, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((c, e), (v, e))
    )
    return hidden, weight, torch.randint(0, v, (c,), generator=generator)


def by_autograd(hidden, weight, labels, scale, terms=CROSS_ENTROPY):
    hidden, weight = (x.double().clone().requires_grad_() for x in (hidden, weight))
    logits = hidden @ weight.T
    losses = functional.cross_entropy(
        logits,
        labels,
        reduction="none",
        label_smoothing=terms.label_smoothing,
    )
    losses = losses + terms.z_loss * logits.logsumexp(1) ** 2
    return losses.detach(), *torch.autograd.grad(scale * losses.sum(), (hidden, weight))


def small_tiles(tokens):
    """Tiles of at least ``tokens`` tokens rather than 64."""
    return mock.patch.object(tiles, "LEAST_TILE_TOKENS", tokens)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 70),
    st.integers(1, 9),
    st.integers(1, 53),
    st.integers(2, 25),
    st.sampled_from((CROSS_ENTROPY, LossTerms(0.1), LossTerms(0, 0.02), LossTerms(0.3, 0.5))),
    st.integers(0, 99),
)
def test_losses_and_gradients(c, e, v, tile, terms, seed):
    """1e-12: products of nine terms and sums over fifty logits in float64."""
    hidden, weight, labels = problem(c, e, v, seed=seed)
    losses, dhidden, dweight = by_autograd(hidden, weight, labels, 0.37, terms)
    before = torch.full_like(weight, 0.5)
    total = before.clone()
    with small_tiles(tile):
        ours, correct, ours_dhidden = linear_cross_entropy_with_gradient(
            hidden, weight, labels, scale=0.37, dweight_VE=total, terms=terms, tile_bytes=1
        )
        only, same = linear_cross_entropy(hidden, weight, labels, terms=terms, tile_bytes=1)
    for actual, expected in (
        (ours, losses),
        (only, losses),
        (ours_dhidden, dhidden),
        (total - before, dweight),
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(correct, same)
    assert torch.equal(correct, (hidden @ weight.T).argmax(1) == labels)


@pytest.mark.parametrize("terms", [CROSS_ENTROPY, LossTerms(0.2, 1e-3)])
def test_bf16_sums_in_fp32(terms):
    """2^-7: logits of about one and their gradient are each rounded to bf16 once (2^-8)."""
    hidden, weight, labels = problem(150, 48, 301, dtype=torch.bfloat16)
    weight = weight / 8
    losses, dhidden, dweight = by_autograd(hidden, weight, labels, 1 / 90, terms)
    total = torch.zeros(301, 48)
    ours, _, ours_dhidden = linear_cross_entropy_with_gradient(
        hidden, weight, labels, scale=1 / 90, dweight_VE=total, terms=terms
    )
    assert (ours.dtype, ours_dhidden.dtype) == (torch.float32, torch.bfloat16)
    for actual, expected in ((ours, losses), (ours_dhidden, dhidden), (total, dweight)):
        assert (actual.double() - expected).norm() <= 2**-7 * expected.norm()


def test_a_tile_is_as_large_as_its_bytes_allow():
    assert tile_tokens(1000, element_bytes=4, tile_bytes=4 * 1000 * 100 + 3999) == 100
    assert tile_tokens(10**9, element_bytes=2) == 64
    for device, most in tiles.LOGITS_TILE_BYTES.items():
        tokens = tile_tokens(32000, element_bytes=2, device=device)
        assert most / 2 < 2 * 32000 * tokens <= most


@pytest.mark.parametrize(
    ("words", "device", "tokens"),
    [
        (128256, "cuda", 1024),  # of 1046 that fit
        (32000, "cuda", 4096),
        (10**6, "cuda", 134),  # fewer than a product's tile has
        (128256, "cpu", 196),
    ],
)
def test_a_tile_of_a_gpu_fills_tiles_of_products(words, device, tokens):
    assert tile_tokens(words, element_bytes=2, device=device) == tokens


class Tiles:
    """A stand-in for the projection that notes the tiles it makes and which are still alive."""

    def __init__(self):
        self.rows, self.most_alive, self._made = [], 0, []

    def __call__(self, hidden, weight):
        alive = sum(made() is not None for made in self._made)
        self.most_alive = max(self.most_alive, alive + 1)
        logits = functional.linear(hidden, weight)
        self.rows.append(len(logits))
        self._made.append(weakref.ref(logits))
        return logits


def run_both(hidden, weight, labels, *, tile_bytes):
    """The pass with a gradient and the pass without, as functions to call."""
    total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    yield lambda: linear_cross_entropy_with_gradient(
        hidden, weight, labels, scale=1.0, dweight_VE=total, tile_bytes=tile_bytes
    )
    yield lambda: linear_cross_entropy(hidden, weight, labels, tile_bytes=tile_bytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_tile_is_gone_before_the_next(dtype):
    tile = 50 * 100 * dtype.itemsize
    for run in run_both(*problem(333, 8, 50, dtype=dtype), tile_bytes=tile):
        tiles = Tiles()
        with mock.patch.object(cross_entropy, "linear", tiles):
            run()
        assert tiles.rows == [100, 100, 100, 33]
        assert tiles.most_alive == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_a_tile_of_logits_and_some_rows_of_it(dtype):
    """As planned for: logits in their own dtype, a tile of rows in fp32 where they are narrower.

    Beside those, outputs and a tile of the weight gradient: below 0.8 MiB with these shapes. With
    AMX oneDNN takes 2 MiB more in bf16, and much more where the hidden size is below its tiles'.
    """
    tile, rows = 64 * 150_000 * dtype.itemsize, MIB * (dtype is torch.bfloat16)
    amx = dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    hidden_size, scratch = (64, 2 * MIB) if amx else (2, 0)
    for run in run_both(*problem(2 * 64, hidden_size, 150_000, dtype=dtype), tile_bytes=tile):
        assert tile + rows / 2 < peak_bytes(run) <= tile + rows + scratch + 0.8 * MIB
