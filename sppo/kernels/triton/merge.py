"""Merge of two partial attentions of the same queries by log-sum-exp, in place of the first.

Legend: H heads, r queries, D head size, m queries of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sppo.kernels.triton.launch import accumulation_type, on_device_of, row_major

_QUERIES = 32


@triton.jit
def _merge_kernel(
    o_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    num_queries,
    o_head,
    o_query,
    lse_head,
    part_head,
    part_query,
    part_lse_head,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    query_m = tl.program_id(0).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
    head = tl.program_id(1).to(tl.int64)
    d_D = tl.arange(0, BLOCK)
    real_m = query_m < num_queries
    lse_ptr += head * lse_head
    o_ptr += head * o_head
    lse_m = tl.load(lse_ptr + query_m, mask=real_m, other=0.0).to(ACC_DTYPE)
    part_lse_m = tl.load(part_lse_ptr + head * part_lse_head + query_m, mask=real_m, other=0.0)
    part_lse_m = part_lse_m.to(ACC_DTYPE)
    larger_m = tl.maximum(lse_m, part_lse_m)
    larger_m = tl.where(larger_m == float("-inf"), 0.0, larger_m)  # neither part saw a key
    kept_m = tl.exp(lse_m - larger_m)
    added_m = tl.exp(part_lse_m - larger_m)
    total_m = kept_m + added_m
    scale_m = 1.0 / tl.where(total_m == 0.0, 1.0, total_m)
    inside_mD = real_m[:, None] & (d_D[None, :] < SIZE)
    o_at_mD = o_ptr + query_m[:, None] * o_query + d_D[None, :]
    part_at_mD = part_ptr + head * part_head + query_m[:, None] * part_query + d_D[None, :]
    o_mD = tl.load(o_at_mD, mask=inside_mD, other=0.0).to(ACC_DTYPE)
    part_mD = tl.load(part_at_mD, mask=inside_mD, other=0.0).to(ACC_DTYPE)
    o_mD = o_mD * (kept_m * scale_m)[:, None] + part_mD * (added_m * scale_m)[:, None]
    tl.store(o_at_mD, o_mD.to(o_ptr.dtype.element_ty), mask=inside_mD)
    tl.store(lse_ptr + query_m, larger_m + tl.log(total_m), mask=real_m)


def merge_(o_HrD: Tensor, lse_Hr: Tensor, part_HrD: Tensor, part_lse_Hr: Tensor) -> None:
    """Set ``lse = log(exp(lse) + exp(part_lse))`` and ``o`` to the mean weighted by both terms.

    Args:
        o_HrD: Attention merged so far, fp32 or better; overwritten.
        lse_Hr: Log-sum-exp of ``o_HrD``; overwritten.
        part_HrD: Partial attention to merge, in any type.
        part_lse_Hr: Log-sum-exp of ``part_HrD``.
    """
    heads, queries, head_size = o_HrD.shape
    assert o_HrD.stride(-1) == lse_Hr.stride(-1) == 1, "what is written in place is not copied"
    part_HrD, part_lse_Hr = row_major(part_HrD), row_major(part_lse_Hr)
    with on_device_of(o_HrD):
        _merge_kernel[(triton.cdiv(queries, _QUERIES), heads)](
            o_HrD,
            lse_Hr,
            part_HrD,
            part_lse_Hr,
            queries,
            *o_HrD.stride()[:2],
            lse_Hr.stride(0),
            *part_HrD.stride()[:2],
            part_lse_Hr.stride(0),
            SIZE=head_size,
            BLOCK=triton.next_power_of_2(head_size),
            QUERIES=_QUERIES,
            ACC_DTYPE=accumulation_type(lse_Hr.dtype),
        )
