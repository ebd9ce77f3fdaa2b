"""Kernel of the gradients of keys and values, added in place to fp32 totals.

One program owns a block of keys of one key/value head. The program iterates over all queries of the
group that see the block, and then adds once: no other program adds to the same elements, so the
result is bitwise independent of the order in which programs run.

Heads and queries are one loop: with two nested loops, the compiler keeps the addresses of the inner
loop's first loads in registers throughout, and the sums do not fit in the remaining registers.

Legend: C queries, T keys, N query heads, K key/value heads, G = N/K, D head size, m queries and
t keys of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sppo.kernels.triton.launch import add_rows, dot, load_rows
from sppo.kernels.triton.visible_keys import query_run


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
    """Add the gradients of a block of keys, from all queries of the span, to dk and dv.

    dk and dv are fp32 or better. Rows past the last query are loaded as zeros and add nothing.
    """
    key = tl.program_id(0) * KEYS
    kv_head = tl.program_id(1).to(tl.int64)
    start = num_keys - num_queries
    key_t = key + tl.arange(0, KEYS)
    d_D = tl.arange(0, BLOCK)
    k_tD = load_rows(k_ptr + kv_head * k_head, key_t, num_keys, k_token, d_D, SIZE, FIT=False)
    v_tD = load_rows(v_ptr + kv_head * v_head, key_t, num_keys, v_token, d_D, SIZE, FIT=False)
    dk_tD = tl.zeros([KEYS, BLOCK], ACC_DTYPE)
    dv_tD = tl.zeros([KEYS, BLOCK], ACC_DTYPE)
    begin, end = query_run(first_ptr, key, num_queries, num_keys, HAS_FIRST, QUERIES, KEYS)
    blocks = tl.cdiv(end - begin, QUERIES)
    for step in range(0, group * blocks):
        head = kv_head * group + step // blocks
        query_m = begin + step % blocks * QUERIES + tl.arange(0, QUERIES)
        real_m = query_m < num_queries
        q_mD = load_rows(q_ptr + head * q_head, query_m, num_queries, q_token, d_D, SIZE, FIT=False)
        do_mD = load_rows(
            do_ptr + head * do_head, query_m, num_queries, do_token, d_D, SIZE, FIT=False
        )
        lse_m = tl.load(lse_ptr + head * num_queries + query_m, mask=real_m, other=0.0) * TO_BASE_2
        scores_tm = dot(k_tD, tl.trans(q_mD), UPCAST, ACC_DTYPE) * (SCALE * TO_BASE_2)
        weights_tm = tl.exp2(scores_tm - lse_m[None, :])
        visible_tm = key_t[:, None] <= (start + query_m)[None, :]
        if HAS_FIRST:
            first_m = tl.load(first_ptr + query_m, mask=real_m, other=0)
            visible_tm = visible_tm & (key_t[:, None] >= first_m[None, :])
        weights_tm = tl.where(visible_tm, weights_tm, 0.0)
        dv_tD += dot(weights_tm.to(do_mD.dtype), do_mD, UPCAST, ACC_DTYPE)
        dweights_tm = dot(v_tD, tl.trans(do_mD), UPCAST, ACC_DTYPE)
        delta_m = tl.load(delta_ptr + head * num_queries + query_m, mask=real_m, other=0.0)
        dscores_tm = weights_tm * (dweights_tm - delta_m[None, :])
        dk_tD += dot(dscores_tm.to(q_mD.dtype), q_mD, UPCAST, ACC_DTYPE)
    add_rows(dk_ptr + kv_head * dk_head, key_t, num_keys, dk_token, d_D, dk_tD * SCALE, SIZE)
    add_rows(dv_ptr + kv_head * dv_head, key_t, num_keys, dv_token, d_D, dv_tD, SIZE)
