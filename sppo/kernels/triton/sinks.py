"""Gradient of attention sinks in one pass over the attention output and its gradient.

A program sums the queries of a tile for one head, and torch adds these partial sums, always in the
same order.

Legend: C queries, N heads, D head size, m queries of a tile, P programs of a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sppo.kernels.triton.launch import accumulation_type, on_device_of, row_major

_QUERIES = 32


@triton.jit
def _sink_gradient_kernel(
    do_ptr,
    o_ptr,
    lse_ptr,
    sinks_ptr,
    partial_ptr,
    num_queries,
    do_query,
    do_head,
    o_query,
    o_head,
    lse_head,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    query_m = tl.program_id(0).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
    head = tl.program_id(1).to(tl.int64)
    d_D = tl.arange(0, BLOCK)
    real_m = query_m < num_queries
    inside_mD = real_m[:, None] & (d_D[None, :] < SIZE)
    do_at_mD = do_ptr + query_m[:, None] * do_query + head * do_head + d_D[None, :]
    o_at_mD = o_ptr + query_m[:, None] * o_query + head * o_head + d_D[None, :]
    do_mD = tl.load(do_at_mD, mask=inside_mD, other=0.0).to(ACC_DTYPE)
    o_mD = tl.load(o_at_mD, mask=inside_mD, other=0.0).to(ACC_DTYPE)
    lse_m = tl.load(lse_ptr + head * lse_head + query_m, mask=real_m, other=0.0).to(ACC_DTYPE)
    sink = tl.load(sinks_ptr + head).to(ACC_DTYPE)
    share_m = tl.where(real_m, tl.exp(sink - lse_m), 0.0)
    total = -tl.sum(share_m * tl.sum(do_mD * o_mD, 1), 0)
    tl.store(partial_ptr + tl.program_id(0) * tl.num_programs(1) + head, total)


def sink_gradient(do_CND: Tensor, o_CND: Tensor, lse_NC: Tensor, sinks_N: Tensor) -> Tensor:
    """Compute :func:`sppo.kernels.sinks.sink_gradient`, ``[N]`` in fp32 or better."""
    do_CND, o_CND, lse_NC = row_major(do_CND), row_major(o_CND), row_major(lse_NC)
    queries, heads, head_size = o_CND.shape
    acc_dtype = torch.promote_types(o_CND.dtype, torch.float32)
    programs = triton.cdiv(queries, _QUERIES)
    partial_PN = torch.empty((programs, heads), dtype=acc_dtype, device=o_CND.device)
    with on_device_of(o_CND):
        _sink_gradient_kernel[(programs, heads)](
            do_CND,
            o_CND,
            lse_NC,
            sinks_N,
            partial_PN,
            queries,
            *do_CND.stride()[:2],
            *o_CND.stride()[:2],
            lse_NC.stride(0),
            SIZE=head_size,
            BLOCK=triton.next_power_of_2(head_size),
            QUERIES=_QUERIES,
            ACC_DTYPE=accumulation_type(o_CND.dtype),
        )
    return partial_PN.sum(0)
