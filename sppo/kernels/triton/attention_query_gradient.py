"""Kernel of the gradient of queries: one program owns a block of queries of one head.

Legend: C queries, T keys, N query heads, K key/value heads, G = N/K, D head size, m queries and
t keys of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sppo.kernels.triton.launch import dot, load_rows, store_rows
from sppo.kernels.triton.visible_keys import is_visible, key_runs


@triton.jit
def _add_to_dq(
    dq_mD,
    q_mD,
    do_mD,
    lse_m,
    delta_m,
    k_ptr,
    v_ptr,
    k_stride,
    v_stride,
    first_m,
    position_m,
    d_D,
    begin,
    end,
    num_keys,
    SCALE: tl.constexpr,
    SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    UPCAST: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Return dq plus the terms of the keys of ``[begin, end)``, not yet multiplied by scale."""
    for key in range(begin, end, KEYS):
        key_t = key + tl.arange(0, KEYS)
        k_tD = load_rows(k_ptr, key_t, num_keys, k_stride, d_D, SIZE, FIT=not MASKED)
        v_tD = load_rows(v_ptr, key_t, num_keys, v_stride, d_D, SIZE, FIT=not MASKED)
        scores_mt = dot(q_mD, tl.trans(k_tD), UPCAST, ACC_DTYPE) * SCALE
        weights_mt = tl.exp2(scores_mt - lse_m[:, None])
        if MASKED:
            visible_mt = is_visible(first_m, position_m, key_t, HAS_FIRST)
            weights_mt = tl.where(visible_mt, weights_mt, 0.0)
        dweights_mt = dot(do_mD, tl.trans(v_tD), UPCAST, ACC_DTYPE)
        dscores_mt = weights_mt * (dweights_mt - delta_m[:, None])
        dq_mD += dot(dscores_mt.to(k_tD.dtype), k_tD, UPCAST, ACC_DTYPE)
    return dq_mD


@triton.jit(do_not_specialize=["num_queries", "num_keys", "group"])
def query_gradient_kernel(
    do_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    first_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    num_queries,
    num_keys,
    group,
    do_token,
    do_head,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    dq_token,
    dq_head,
    SCALE: tl.constexpr,
    TO_BASE_2: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    UPCAST: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Write dq of a block of queries."""
    query = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES  # the longest rows first
    head = tl.program_id(1).to(tl.int64)
    start = num_keys - num_queries
    query_m = query + tl.arange(0, QUERIES)
    position_m = start + query_m
    d_D = tl.arange(0, BLOCK)
    real_m = query_m < num_queries
    first_m = query_m
    if HAS_FIRST:
        first_m = tl.load(first_ptr + query_m, mask=real_m, other=0)
    k_ptr += head // group * k_head
    v_ptr += head // group * v_head
    q_mD = load_rows(q_ptr + head * q_head, query_m, num_queries, q_token, d_D, SIZE, FIT=False)
    do_mD = load_rows(do_ptr + head * do_head, query_m, num_queries, do_token, d_D, SIZE, FIT=False)
    lse_m = tl.load(lse_ptr + head * num_queries + query_m, mask=real_m, other=0.0) * TO_BASE_2
    delta_m = tl.load(delta_ptr + head * num_queries + query_m, mask=real_m, other=0.0)
    dq_mD = tl.zeros([QUERIES, BLOCK], ACC_DTYPE)
    begin, full_begin, full_end, end = key_runs(
        first_ptr, query, num_queries, start, HAS_FIRST, QUERIES, KEYS
    )
    if HAS_FIRST:
        dq_mD = _add_to_dq(
            dq_mD, q_mD, do_mD, lse_m, delta_m, k_ptr, v_ptr, k_token, v_token, first_m,
            position_m, d_D, begin, full_begin, num_keys,
            SCALE * TO_BASE_2, SIZE, KEYS, True, HAS_FIRST, UPCAST, ACC_DTYPE,
        )  # fmt: skip
    dq_mD = _add_to_dq(
        dq_mD, q_mD, do_mD, lse_m, delta_m, k_ptr, v_ptr, k_token, v_token, first_m,
        position_m, d_D, full_begin, full_end, num_keys,
        SCALE * TO_BASE_2, SIZE, KEYS, False, HAS_FIRST, UPCAST, ACC_DTYPE,
    )  # fmt: skip
    dq_mD = _add_to_dq(
        dq_mD, q_mD, do_mD, lse_m, delta_m, k_ptr, v_ptr, k_token, v_token, first_m,
        position_m, d_D, full_end, end, num_keys,
        SCALE * TO_BASE_2, SIZE, KEYS, True, HAS_FIRST, UPCAST, ACC_DTYPE,
    )  # fmt: skip
    store_rows(dq_ptr + head * dq_head, query_m, num_queries, dq_token, d_D, dq_mD * SCALE, SIZE)
