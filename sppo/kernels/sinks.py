"""Attention sinks: a logit per head that takes part in the softmax of the scores and has no value.

A sink s is applied to the result of attention without it: with the log-sum-exp lse of the scores of
a query, ``lse' = log(exp(lse) + exp(s))`` and ``o' = o exp(lse - lse')``. The backward of attention
needs no change. Given o' and lse', its probabilities ``exp(score - lse')`` are those beside the
sink, and ``rowsum(do o')`` is what the softmax's backward takes off, for the sink's value is zero.
The gradient of s is ``-sum exp(s - lse') rowsum(do o')`` over the queries.

Legend: C queries, N heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sppo.kernels.fused import fused
from sppo.kernels.row_tiles import row_tiles


def apply_sinks_(o_CND: Tensor, lse_NC: Tensor, sinks_N: Tensor) -> Tensor:
    """Return the log-sum-exp ``[N, C]`` with the sinks; scale the attention output in place."""
    with_sinks_NC = torch.logaddexp(lse_NC, sinks_N.to(lse_NC.dtype)[:, None])
    o_CND.mul_((lse_NC - with_sinks_NC).exp_().t().unsqueeze(-1))
    return with_sinks_NC


def sink_gradient(do_CND: Tensor, o_CND: Tensor, lse_NC: Tensor, sinks_N: Tensor) -> Tensor:
    """Return the gradient of the sinks, ``[N]`` in fp32 or better.

    Args:
        do_CND: Gradient of the attention output.
        o_CND: Attention output with the sinks.
        lse_NC: Log-sum-exp with the sinks.
        sinks_N: The sinks.
    """
    if fused(o_CND):
        from sppo.kernels.triton import sinks

        return sinks.sink_gradient(do_CND, o_CND, lse_NC, sinks_N)
    total_N = torch.zeros_like(sinks_N, dtype=lse_NC.dtype)
    for rows in row_tiles(o_CND):
        share_NC = (sinks_N.to(lse_NC.dtype)[:, None] - lse_NC[:, rows]).exp_()
        product_CN = (do_CND[rows].to(lse_NC.dtype) * o_CND[rows]).sum(-1)
        total_N -= share_NC.mul_(product_CN.t()).sum(1)
    return total_N
