"""Backward of attention of a span over its prefix, in two kernels.

A program of the first kernel computes dq of a block of queries of one head. A program of the second
kernel owns a block of keys of one key/value head, iterates over all queries of the group that see
the block, and adds dk and dv once to the fp32 totals of the sequence: no other gradient of the
prefix is stored, and the result does not depend on the order in which programs run.

With p = exp(scale q.k - lse) and delta = sum_D(do o):
ds = p (do.v - delta), dq = scale ds k, dk = scale ds^T q, dv = p^T do.

Legend: C queries, T keys, N query heads, K key/value heads, G = N/K, D head size, m queries and
t keys of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sppo.kernels.triton.attention_key_gradient import key_gradient_kernel
from sppo.kernels.triton.attention_query_gradient import query_gradient_kernel
from sppo.kernels.triton.launch import (
    LOG2_E,
    accumulation_type,
    block_size,
    compute_major,
    load_rows,
    must_upcast,
    on_device_of,
    row_major,
)
from sppo.kernels.triton.tiles import AttentionTiles, Tiles, attention_tiles
from sppo.kernels.triton.visible_keys import VisibleKeys, visible_keys

_DELTA_ELEMENTS = 4096


@triton.jit(do_not_specialize=["num_queries"])
def _delta_kernel(
    o_ptr, do_ptr, delta_ptr, num_queries, o_token, o_head, do_token, do_head,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr, ACC_DTYPE: tl.constexpr,
):  # fmt: skip
    query_m = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    head = tl.program_id(1).to(tl.int64)
    d_D = tl.arange(0, BLOCK)
    o_mD = load_rows(o_ptr + head * o_head, query_m, num_queries, o_token, d_D, SIZE, FIT=False)
    do_mD = load_rows(do_ptr + head * do_head, query_m, num_queries, do_token, d_D, SIZE, FIT=False)
    delta_m = tl.sum(o_mD.to(ACC_DTYPE) * do_mD.to(ACC_DTYPE), 1)
    tl.store(delta_ptr + head * num_queries + query_m, delta_m, mask=query_m < num_queries)


def attention_backward(
    do_CND: Tensor,
    q_CND: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    o_CND: Tensor,
    lse_NC: Tensor,
    *,
    dk_TKD: Tensor,
    dv_TKD: Tensor,
    scale: float,
    window: int | None,
    document_starts: tuple[int, ...],
    tiles: AttentionTiles | None = None,
) -> Tensor:
    """Return dq and add dk and dv, see :class:`sppo.kernels.attention.kernel.AttentionKernel`.

    ``tiles`` None stands for :func:`sppo.kernels.triton.tiles.attention_tiles`.
    """
    assert dk_TKD.stride(-1) == dv_TKD.stride(-1) == 1, "totals are added to where they lie"
    keys = visible_keys(
        q_CND.shape[0],
        k_TKD.shape[0],
        window=window,
        document_starts=document_starts,
        device=q_CND.device,
    )
    seen = slice(keys.earliest, None)
    do, q, k, v, o = (row_major(x) for x in (do_CND, q_CND, k_TKD[seen], v_TKD[seen], o_CND))
    block = block_size(q.shape[2])
    call = _Call(do, q, k, v, lse_NC.contiguous(), keys, scale, block)
    with on_device_of(q):
        cuts = tiles or attention_tiles(block, q.element_size(), compute_major())
        delta_NC = _delta(do, o, block)
        dq_CND = call.query_gradient(delta_NC, cuts)
        call.add_key_gradients(delta_NC, dk_TKD[seen], dv_TKD[seen], cuts)
    return dq_CND


def _delta(do: Tensor, o: Tensor, block: int) -> Tensor:
    """Return ``sum_D(do o)``, ``[N, C]`` in fp32 or better."""
    num_queries, heads, head_size = do.shape
    acc_dtype = torch.promote_types(do.dtype, torch.float32)
    delta_NC = torch.empty((heads, num_queries), dtype=acc_dtype, device=do.device)
    rows = max(1, _DELTA_ELEMENTS // block)
    _delta_kernel[(triton.cdiv(num_queries, rows), heads)](
        o,
        do,
        delta_NC,
        num_queries,
        *o.stride()[:2],
        *do.stride()[:2],
        SIZE=head_size,
        BLOCK=block,
        QUERIES=rows,
        ACC_DTYPE=accumulation_type(do.dtype),
    )
    return delta_NC


@dataclass(frozen=True, slots=True)
class _Call:
    """Operands of both backward kernels, and their launches."""

    do: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse_NC: Tensor
    keys: VisibleKeys
    scale: float
    block: int

    def query_gradient(self, delta_NC: Tensor, tiles: AttentionTiles) -> Tensor:
        """Return dq_CND."""
        num_queries, heads, _ = self.q.shape
        dq = torch.empty(self.q.shape, dtype=self.q.dtype, device=self.q.device)
        grid = (triton.cdiv(num_queries, tiles.query_gradient.queries), heads)
        self._launch(query_gradient_kernel, grid, delta_NC, (dq,), tiles.query_gradient)
        return dq

    def add_key_gradients(
        self, delta_NC: Tensor, dk: Tensor, dv: Tensor, tiles: AttentionTiles
    ) -> None:
        """Add the gradients of keys and values to ``dk`` and ``dv``."""
        num_keys, kv_heads, _ = self.k.shape
        grid = (triton.cdiv(num_keys, tiles.key_gradient.keys), kv_heads)
        self._launch(key_gradient_kernel, grid, delta_NC, (dk, dv), tiles.key_gradient)

    def _launch(
        self,
        kernel: Any,
        grid: tuple[int, int],
        delta_NC: Tensor,
        results: tuple[Tensor, ...],
        cut: Tiles,
    ) -> None:
        strided = (self.do, self.q, self.k, self.v, *results)
        kernel[grid](
            self.do,
            self.q,
            self.k,
            self.v,
            self.keys.first_C,
            self.lse_NC,
            delta_NC,
            *results,
            self.q.shape[0],
            self.k.shape[0],
            self.q.shape[1] // self.k.shape[1],
            *(stride for x in strided for stride in x.stride()[:2]),
            SCALE=self.scale,
            TO_BASE_2=LOG2_E,
            SIZE=self.q.shape[2],
            BLOCK=self.block,
            QUERIES=cut.queries,
            KEYS=cut.keys,
            HAS_FIRST=self.keys.first_C is not None,
            UPCAST=must_upcast(self.q.dtype),
            ACC_DTYPE=accumulation_type(self.q.dtype),
            num_warps=cut.warps,
            num_stages=cut.stages,
        )
