"""Losses and gradients of a tile of logits, in torch and in Triton, against float64.

How far results may be off: see :mod:`tests.kernels.operands`.
"""

import pytest
import torch

from sppo.kernels.cross_entropy import LossTerms, token_losses
from tests.kernels.operands import (
    DTYPES,
    TOLERANCE,
    Guarded,
    accumulation_tolerance,
    assert_close,
    dtype_name,
    exact,
    random,
)
from tests.tiers import each_once

SCALE = 0.37
TERMS = [(0.0, 0.0), (0.1, 0.0), (0.0, 0.02), (0.3, 0.5)]
"""Label smoothing, z-loss."""
SHAPES = [(1, 2), (5, 3), (37, 101), (4, 1024), (3, 4097), (2, 9001)]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
in_triton = pytest.mark.parametrize("device", ["triton-cpu"], indirect=True)
pytestmark = pytest.mark.usefixtures("_fresh_memory_is_poisoned")


def random_labels(tokens, words, *, device):
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, words, (tokens,), generator=generator)
    labels[0] = words - 1
    return labels.to(device)


def by_definition(logits, labels, smoothing, z_loss):
    """(losses, gradient of ``SCALE * losses.sum()``) in float64, on the CPU."""
    logits, labels = logits.requires_grad_(), labels.cpu()
    lse = logits.logsumexp(1)
    wanted = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    losses = lse - (1 - smoothing) * wanted - smoothing * logits.mean(1) + z_loss * lse.square()
    return losses.detach(), torch.autograd.grad(SCALE * losses.sum(), logits)[0]


def both(logits, labels, smoothing, z_loss):
    """(losses alone, losses with the gradient, the gradient)."""
    terms, guarded = LossTerms(smoothing, z_loss), Guarded(logits)
    alone, correct_alone = token_losses(logits.clone(), labels, terms=terms)
    losses, correct = token_losses(guarded.inside, labels, scale=SCALE, terms=terms)
    assert guarded.intact()
    assert correct.dtype == torch.bool
    assert torch.equal(correct, correct_alone)
    best = logits.nan_to_num(torch.inf).amax(1)
    assert torch.equal(correct, logits.gather(1, labels.unsqueeze(1)).squeeze(1) == best)
    return alone, losses, guarded.inside.clone()


@pytest.mark.parametrize(("shape", "terms", "dtype"), each_once(SHAPES, TERMS, DTYPES), ids=str)
def test_losses_and_gradient(shape, terms, dtype, device):
    (logits,) = random(shape, dtype=dtype, device=device)
    labels = random_labels(*shape, device=device)
    expected = by_definition(*exact(logits), labels, *terms)
    alone, losses, gradient = both(logits, labels, *terms)
    acc_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    assert (losses.dtype, gradient.dtype) == (acc_dtype, dtype)
    for found in (alone, losses):
        assert_close(found, expected[0], tolerance=accumulation_tolerance(dtype))
    assert_close(gradient, expected[1], tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize(("terms", "dtype"), each_once(TERMS, DTYPES), ids=str)
def test_a_scale_of_the_logits(terms, dtype, device):
    """Applied in the accumulation type, in which 0.13 is exact enough, before all else."""
    (logits,) = random((7, 1500), dtype=dtype, device=device)
    labels, (exact_logits,) = random_labels(7, 1500, device=device), exact(logits)
    losses, gradient = by_definition(0.13 * exact_logits, labels, *terms)
    options = {"terms": LossTerms(*terms), "logits_scale": 0.13}
    alone, correct = token_losses(logits.clone(), labels, **options)
    ours, same = token_losses(logits, labels, scale=SCALE, **options)
    for found in (alone, ours):
        assert_close(found, losses, tolerance=accumulation_tolerance(dtype))
    assert torch.equal(correct, same)
    assert_close(logits, 0.13 * gradient, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize(("terms", "dtype"), each_once(TERMS, DTYPES), ids=str)
def test_one_word(terms, dtype, device):
    """Certain: nothing is left but the z-loss. The gradient is what is left of terms of about 1."""
    (logits,) = random((9, 1), dtype=dtype, device=device)
    _alone, losses, gradient = both(logits, torch.zeros(9, dtype=torch.long).to(device), *terms)
    (z,) = exact(logits)
    exact_losses, exact_gradient = terms[1] * z.square().squeeze(1), 2 * SCALE * terms[1] * z
    for found, value in ((losses, exact_losses), (gradient, exact_gradient)):
        error = float((found.double().cpu() - value).norm())
        assert error <= TOLERANCE[dtype] * float(value.norm()) + accumulation_tolerance(dtype)


@every_dtype
def test_a_tie_is_correct_and_nan_is_not(dtype, device):
    """The largest logit of a row stands at 5 and 1030, in other blocks, or beside a NaN."""
    (logits,) = random((4, 2000), dtype=dtype, device=device)
    logits[:, 5] = logits[:, 1030] = 9.0
    logits[3, 1500] = float("nan")
    labels = torch.tensor([5, 1030, 6, 5], device=device)
    for scale in (None, SCALE):
        _losses, correct = token_losses(logits.clone(), labels, scale=scale)
        assert correct.tolist() == [True, True, False, False]


@pytest.mark.parametrize(("terms", "dtype"), each_once([(0.0, 0.0), (0.2, 0.0)], DTYPES), ids=str)
def test_huge_logits_do_not_overflow(terms, dtype, device):
    """Rising along the row, so that the largest so far is left behind in every block."""
    (logits,) = random((6, 9001), dtype=torch.float64, device=device)
    logits = 1e4 * logits.sort(1).values
    logits = logits.clamp(-6e4, 6e4).to(dtype)
    labels = random_labels(*logits.shape, device=device)
    expected = by_definition(*exact(logits), labels, *terms)
    _alone, losses, gradient = both(logits, labels, *terms)
    assert_close(losses, expected[0], tolerance=accumulation_tolerance(dtype))
    assert_close(gradient, expected[1], tolerance=TOLERANCE[dtype])


@every_dtype
def test_words_that_cannot_be(dtype, device):
    """Logits of minus infinity, a whole block of them first."""
    (logits,) = random((3, 5000), dtype=dtype, device=device)
    logits[:, :4500] = float("-inf")
    labels = torch.tensor([4999, 4500, 4700], device=device)
    expected = exact(logits)[0][:, 4500:]
    expected_losses, expected_gradient = by_definition(expected, labels - 4500, 0.0, 0.01)
    _alone, losses, gradient = both(logits, labels, 0.0, 0.01)
    assert_close(losses, expected_losses, tolerance=accumulation_tolerance(dtype))
    assert_close(gradient[:, 4500:], expected_gradient, tolerance=TOLERANCE[dtype])
    assert not gradient[:, :4500].any()


@every_dtype
def test_what_is_not_finite_shows(dtype, device):
    (logits,) = random((2, 2000), dtype=dtype, device=device)
    logits[0, 1500] = float("nan")
    labels = torch.tensor([3, 4], device=device)
    _alone, losses, gradient = both(logits, labels, 0.0, 0.0)
    assert losses.isnan().tolist() == [True, False]
    assert bool(gradient[0].isnan().all())
    assert bool(gradient[1].isfinite().all())


@in_triton
@every_dtype
def test_logits_that_are_not_row_major(dtype, device):
    (across,) = random((50, 7), dtype=dtype, device=device)
    labels = random_labels(7, 50, device=device)
    expected, _ = token_losses(across.T.contiguous(), labels)
    assert torch.equal(token_losses(across.T, labels)[0], expected)
    with pytest.raises(AssertionError, match="in place"):
        token_losses(across.T, labels, scale=1.0)
