"""Gradients of keys and values, added to fp32 totals where those lie.

One program owns a block of keys of one key/value head. It walks over every query of the group that
sees them, and then reads, adds and writes once.

Legend: C queries, T keys, N query heads, K key/value heads, G = N/K, D head size, m queries and
t keys of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sppo.kernels.triton.launch import dot, load_rows, store_rows
from sppo.kernels.triton.visible_keys import query_runs


@triton.jit
def _add_to_dkv(
    dk_tD,
    dv_tD,
    k_tD,
    v_tD,
    q_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    first_ptr,
    q_stride,
    do_stride,
    key_t,
    d_D,
    begin,
    end,
    num_queries,
    start,
    SCALE: tl.constexpr,
    TO_BASE_2: tl.constexpr,
    SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    UPCAST: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """What the queries of ``[begin, end)`` of one head add, dk yet without ``scale``.

    Rows past the last query are zero, and so is all that they add.
    """
    for query in range(begin, end, QUERIES):
        query_m = query + tl.arange(0, QUERIES)
        real_m = query_m < num_queries
        q_mD = load_rows(q_ptr, query_m, num_queries, q_stride, d_D, SIZE, FIT=False)
        do_mD = load_rows(do_ptr, query_m, num_queries, do_stride, d_D, SIZE, FIT=False)
        lse_m = tl.load(lse_ptr + query_m, mask=real_m, other=0.0) * TO_BASE_2
        delta_m = tl.load(delta_ptr + query_m, mask=real_m, other=0.0)
        scores_tm = dot(k_tD, tl.trans(q_mD), UPCAST, ACC_DTYPE) * (SCALE * TO_BASE_2)
        weights_tm = tl.exp2(scores_tm - lse_m[None, :])
        if MASKED:
            visible_tm = key_t[:, None] <= (start + query_m)[None, :]
            if HAS_FIRST:
                first_m = tl.load(first_ptr + query_m, mask=real_m, other=0)
                visible_tm = visible_tm & (key_t[:, None] >= first_m[None, :])
            weights_tm = tl.where(visible_tm, weights_tm, 0.0)
        dv_tD += dot(weights_tm.to(do_mD.dtype), do_mD, UPCAST, ACC_DTYPE)
        dweights_tm = dot(v_tD, tl.trans(do_mD), UPCAST, ACC_DTYPE)
        dscores_tm = weights_tm * (dweights_tm - delta_m[None, :])
        dk_tD += dot(dscores_tm.to(q_mD.dtype), q_mD, UPCAST, ACC_DTYPE)
    return dk_tD, dv_tD


@triton.jit(do_not_specialize=["num_queries", "num_keys", "group"])
def key_gradient_kernel(
    do_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    first_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
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
    dk_token,
    dk_head,
    dv_token,
    dv_head,
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
    """Adds to dk and dv, fp32 or better, what the span's queries give."""
    key = tl.program_id(0) * KEYS
    kv_head = tl.program_id(1).to(tl.int64)
    start = num_keys - num_queries
    key_t = key + tl.arange(0, KEYS)
    d_D = tl.arange(0, BLOCK)
    k_tD = load_rows(k_ptr + kv_head * k_head, key_t, num_keys, k_token, d_D, SIZE, FIT=False)
    v_tD = load_rows(v_ptr + kv_head * v_head, key_t, num_keys, v_token, d_D, SIZE, FIT=False)
    dk_tD = tl.zeros([KEYS, BLOCK], ACC_DTYPE)
    dv_tD = tl.zeros([KEYS, BLOCK], ACC_DTYPE)
    begin, full_begin, end = query_runs(
        first_ptr, key, num_queries, num_keys, HAS_FIRST, QUERIES, KEYS
    )
    if HAS_FIRST:  # one loop: a second copy of it would not fit the registers
        full_begin = end
    for member in range(0, group):
        head = kv_head * group + member
        q_head_ptr = q_ptr + head * q_head
        do_head_ptr = do_ptr + head * do_head
        lse_head_ptr = lse_ptr + head * num_queries
        delta_head_ptr = delta_ptr + head * num_queries
        dk_tD, dv_tD = _add_to_dkv(
            dk_tD, dv_tD, k_tD, v_tD, q_head_ptr, do_head_ptr, lse_head_ptr, delta_head_ptr,
            first_ptr, q_token, do_token, key_t, d_D, begin, full_begin, num_queries, start,
            SCALE, TO_BASE_2, SIZE, QUERIES, True, HAS_FIRST, UPCAST, ACC_DTYPE,
        )  # fmt: skip
        if not HAS_FIRST:
            dk_tD, dv_tD = _add_to_dkv(
                dk_tD, dv_tD, k_tD, v_tD, q_head_ptr, do_head_ptr, lse_head_ptr, delta_head_ptr,
                first_ptr, q_token, do_token, key_t, d_D, full_begin, end, num_queries, start,
                SCALE, TO_BASE_2, SIZE, QUERIES, False, HAS_FIRST, UPCAST, ACC_DTYPE,
            )  # fmt: skip
    dk_ptr += kv_head * dk_head
    dv_ptr += kv_head * dv_head
    dk_tD = dk_tD * SCALE + load_rows(dk_ptr, key_t, num_keys, dk_token, d_D, SIZE, FIT=False)
    store_rows(dk_ptr, key_t, num_keys, dk_token, d_D, dk_tD, SIZE)
    dv_tD += load_rows(dv_ptr, key_t, num_keys, dv_token, d_D, SIZE, FIT=False)
    store_rows(dv_ptr, key_t, num_keys, dv_token, d_D, dv_tD, SIZE)
