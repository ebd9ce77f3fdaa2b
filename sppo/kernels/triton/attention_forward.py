"""Forward of attention of a span over its prefix.

One program owns a block of queries of one head and iterates over the keys that these see; only
tiles with invisible keys are masked. Grouped queries read their group's key/value head. The softmax
is computed in base two: the kernel's ``SCALE`` includes the factor log2(e).

Legend: C queries, T keys, N query heads, K key/value heads, G = N/K, D head size, m queries and
t keys of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sppo.kernels.triton.launch import (
    LN_2,
    LOG2_E,
    accumulation_type,
    block_size,
    compute_major,
    dot,
    load_rows,
    must_upcast,
    on_device_of,
    row_major,
    store_rows,
)
from sppo.kernels.triton.tiles import AttentionTiles, attention_tiles
from sppo.kernels.triton.visible_keys import is_visible, key_runs, visible_keys


@triton.jit
def _attend(
    o_mD,
    total_m,
    largest_m,
    q_mD,
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
    """Return the running (o, sum of weights, largest score) after the keys of ``[begin, end)``."""
    for key in range(begin, end, KEYS):
        key_t = key + tl.arange(0, KEYS)
        k_tD = load_rows(k_ptr, key_t, num_keys, k_stride, d_D, SIZE, FIT=not MASKED)
        v_tD = load_rows(v_ptr, key_t, num_keys, v_stride, d_D, SIZE, FIT=not MASKED)
        scores_mt = dot(q_mD, tl.trans(k_tD), UPCAST, ACC_DTYPE) * SCALE
        if MASKED:
            visible_mt = is_visible(first_m, position_m, key_t, HAS_FIRST)
            scores_mt = tl.where(visible_mt, scores_mt, float("-inf"))
        now_m = tl.maximum(largest_m, tl.max(scores_mt, 1))
        base_m = now_m
        if MASKED:  # the row may have seen no key yet
            base_m = tl.where(now_m == float("-inf"), 0.0, now_m)
        weights_mt = tl.exp2(scores_mt - base_m[:, None])
        kept_m = tl.exp2(largest_m - base_m)
        total_m = total_m * kept_m + tl.sum(weights_mt, 1)
        o_mD = o_mD * kept_m[:, None] + dot(weights_mt.to(v_tD.dtype), v_tD, UPCAST, ACC_DTYPE)
        largest_m = now_m
    return o_mD, total_m, largest_m


@triton.jit(do_not_specialize=["num_queries", "num_keys", "group"])
def _forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    first_ptr,
    o_ptr,
    lse_ptr,
    num_queries,
    num_keys,
    group,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    o_token,
    o_head,
    SCALE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    UPCAST: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    TO_NATURAL: tl.constexpr,
):
    query = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES  # the longest rows first
    head = tl.program_id(1).to(tl.int64)
    kv_head = head // group
    start = num_keys - num_queries
    query_m = query + tl.arange(0, QUERIES)
    position_m = start + query_m
    d_D = tl.arange(0, BLOCK)
    first_m = query_m
    if HAS_FIRST:
        first_m = tl.load(first_ptr + query_m, mask=query_m < num_queries, other=0)
    k_ptr += kv_head * k_head
    v_ptr += kv_head * v_head
    q_mD = load_rows(q_ptr + head * q_head, query_m, num_queries, q_token, d_D, SIZE, FIT=False)
    o_mD = tl.zeros([QUERIES, BLOCK], ACC_DTYPE)
    total_m = tl.zeros([QUERIES], ACC_DTYPE)
    largest_m = tl.full([QUERIES], float("-inf"), ACC_DTYPE)
    begin, full_begin, full_end, end = key_runs(
        first_ptr, query, num_queries, start, HAS_FIRST, QUERIES, KEYS
    )
    if HAS_FIRST:
        o_mD, total_m, largest_m = _attend(
            o_mD, total_m, largest_m, q_mD, k_ptr, v_ptr, k_token, v_token, first_m, position_m,
            d_D, begin, full_begin, num_keys, SCALE, SIZE, KEYS, True, HAS_FIRST, UPCAST, ACC_DTYPE,
        )  # fmt: skip
    o_mD, total_m, largest_m = _attend(
        o_mD, total_m, largest_m, q_mD, k_ptr, v_ptr, k_token, v_token, first_m, position_m,
        d_D, full_begin, full_end, num_keys, SCALE, SIZE, KEYS, False, HAS_FIRST, UPCAST, ACC_DTYPE,
    )  # fmt: skip
    o_mD, total_m, largest_m = _attend(
        o_mD, total_m, largest_m, q_mD, k_ptr, v_ptr, k_token, v_token, first_m, position_m,
        d_D, full_end, end, num_keys, SCALE, SIZE, KEYS, True, HAS_FIRST, UPCAST, ACC_DTYPE,
    )  # fmt: skip
    o_mD = o_mD / total_m[:, None]
    store_rows(o_ptr + head * o_head, query_m, num_queries, o_token, d_D, o_mD, SIZE)
    lse_m = (largest_m + tl.log2(total_m)) * TO_NATURAL
    tl.store(lse_ptr + head * num_queries + query_m, lse_m, mask=query_m < num_queries)


def attention_forward(
    q_CND: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    *,
    scale: float,
    window: int | None,
    document_starts: tuple[int, ...],
    tiles: AttentionTiles | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (o, lse), see :class:`sppo.kernels.attention.kernel.AttentionKernel`.

    ``tiles`` None stands for :func:`sppo.kernels.triton.tiles.attention_tiles`.
    """
    num_queries, heads, head_size = q_CND.shape
    keys = visible_keys(
        num_queries,
        k_TKD.shape[0],
        window=window,
        document_starts=document_starts,
        device=q_CND.device,
    )
    q, k, v = (row_major(x) for x in (q_CND, k_TKD[keys.earliest :], v_TKD[keys.earliest :]))
    block = block_size(head_size)
    o_CND = torch.empty((num_queries, heads, head_size), dtype=q.dtype, device=q.device)
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    lse_NC = torch.empty((heads, num_queries), dtype=acc_dtype, device=q.device)
    with on_device_of(q):
        cut = (tiles or attention_tiles(block, q.element_size(), compute_major())).forward
        _forward_kernel[(triton.cdiv(num_queries, cut.queries), heads)](
            q,
            k,
            v,
            keys.first_C,
            o_CND,
            lse_NC,
            num_queries,
            k.shape[0],
            heads // k.shape[1],
            *(stride for x in (q, k, v, o_CND) for stride in x.stride()[:2]),
            SCALE=scale * LOG2_E,
            SIZE=head_size,
            BLOCK=block,
            QUERIES=cut.queries,
            KEYS=cut.keys,
            HAS_FIRST=keys.first_C is not None,
            UPCAST=must_upcast(q.dtype),
            ACC_DTYPE=accumulation_type(q.dtype),
            TO_NATURAL=LN_2,
            num_warps=cut.warps,
            num_stages=cut.stages,
        )
    return o_CND, lse_NC
