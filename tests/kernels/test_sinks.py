"""Attention sinks in torch and in Triton, against a softmax over the scores and the sink."""

import pytest
import torch

from sppo.kernels.sinks import apply_sinks_, sink_gradient
from tests.kernels.operands import (
    DTYPES,
    TOLERANCE,
    accumulation_tolerance,
    assert_close,
    dtype_name,
    exact,
    random,
)

QUERIES, HEADS, SIZE = 45, 3, 12

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)


def softmax_beside_sinks(scores_NCT, v_TND, sinks_N):
    with_sink = torch.cat([scores_NCT, sinks_N[:, None, None].expand(-1, QUERIES, 1)], -1)
    weights = with_sink.softmax(-1)[..., :-1]
    return torch.einsum("nct,tnd->cnd", weights, v_TND), with_sink.logsumexp(-1)


@every_dtype
def test_output_and_gradient(dtype, device):
    do, v, scores, sinks = random(
        (QUERIES, HEADS, SIZE), (70, HEADS, SIZE), (HEADS, QUERIES, 70), (HEADS,),
        dtype=dtype, device=device,
    )  # fmt: skip
    sinks = 3 + sinks
    exact_scores, exact_v, exact_sinks = exact(scores, v, sinks)
    exact_sinks.requires_grad_()
    expected, expected_lse = softmax_beside_sinks(exact_scores, exact_v, exact_sinks)
    (gradient,) = torch.autograd.grad(expected, exact_sinks, *exact(do))
    acc_dtype = torch.promote_types(dtype, torch.float32)
    o = torch.einsum("nct,tnd->cnd", exact_scores.softmax(-1), exact_v).to(device, dtype)
    lse = exact_scores.logsumexp(-1).to(device, acc_dtype)
    lse = apply_sinks_(o, lse, sinks)
    assert (o.dtype, lse.dtype) == (dtype, acc_dtype)
    assert_close(o, expected.detach(), tolerance=2 * TOLERANCE[dtype])
    assert_close(lse, expected_lse.detach(), tolerance=accumulation_tolerance(dtype))
    ours = sink_gradient(do, o, lse, sinks)
    assert ours.dtype == acc_dtype
    assert_close(ours, gradient, tolerance=2 * TOLERANCE[dtype])


def test_a_sink_of_minus_infinity_changes_nothing():
    o, lse = random((5, 2, 4), (2, 5), dtype=torch.float64, device="cpu")[:2]
    before = o.clone(), lse.clone()
    lse = apply_sinks_(o, lse, torch.full((2,), float("-inf"), dtype=torch.float64))
    assert torch.equal(o, before[0])
    assert torch.equal(lse, before[1])
    assert not sink_gradient(o, o, lse, torch.full((2,), float("-inf"))).any()
