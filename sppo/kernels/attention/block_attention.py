"""Attention over a prefix, computed in blocks that are merged by log-sum-exp.

Any kernel that computes a full rectangle, a causal square and a masked rectangle, and returns the
log-sum-exp of each row, can compute a whole subsequence. Partial outputs are merged in fp32
(:mod:`sppo.kernels.attention.merged_output`). In backward each block uses the *global* lse and o,
so the gradients of the blocks are exact and are summed.

Grouped queries never repeat K/V in memory: a full rectangle folds the query group into its rows,
and a causal square reads K/V through a stride of zero.

Legend: C queries, T keys, N query heads, K key/value heads, G = N/K, D head size, r rows, t keys
of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sppo.kernels.attention.blocks import Block, BlockKind, cut_to_token_multiples
from sppo.kernels.attention.merged_output import MergedOutput, tokens_first
from sppo.kernels.row_tiles import accumulation_tiles


class BlockKernel(Protocol):
    """Kernel of one block of attention; all tensors are ``[batch, heads, tokens, D]``."""

    def backward_token_multiple(self, dtype: torch.dtype) -> int | None:
        """Return the tokens of which backward prefers whole multiples; None for no preference."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return (o like q, lse ``[batch, heads, r]`` in fp32 or better)."""
        ...

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) like q, k, v; ``o`` and ``lse`` are those over all keys."""
        ...


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Numbers of heads, and their size, of one attention call."""

    heads: int
    kv_heads: int
    head_size: int

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads


def forward(
    kernel: BlockKernel,
    q_CND: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    *,
    blocks: tuple[Block, ...],
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return (o_CND in q's dtype, lse_NC in fp32 or better) of a span, block by block."""
    q_NCD = q_CND.transpose(0, 1).contiguous()
    merged = MergedOutput(q_NCD, kv_heads=k_TKD.shape[1])
    for block in blocks:
        _forward_block(kernel, block, q_NCD, k_TKD, v_TKD, merged, window=window, scale=scale)
    del q_NCD
    return merged.result(q_CND.dtype)


def backward(
    kernel: BlockKernel,
    do_CND: Tensor,
    q_CND: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    o_CND: Tensor,
    lse_NC: Tensor,
    *,
    dk_TKD: Tensor,
    dv_TKD: Tensor,
    blocks: tuple[Block, ...],
    window: int | None,
    scale: float,
) -> Tensor:
    """Return dq_CND of a span; add to ``dk_TKD`` and ``dv_TKD`` (fp32 or better) in place."""
    multiple = kernel.backward_token_multiple(q_CND.dtype)
    if multiple is not None:
        blocks = cut_to_token_multiples(blocks, multiple, window=window)
    q_NCD, o_NCD, do_NCD = (x.transpose(0, 1).contiguous() for x in (q_CND, o_CND, do_CND))
    dq_NCD = torch.zeros_like(q_NCD, dtype=lse_NC.dtype)
    for block in blocks:
        _backward_block(
            kernel,
            block,
            (do_NCD, q_NCD, o_NCD, lse_NC),
            k_TKD,
            v_TKD,
            (dq_NCD, dk_TKD, dv_TKD),
            window=window,
            scale=scale,
        )
    del q_NCD, o_NCD, do_NCD
    return tokens_first(dq_NCD, q_CND.dtype)


def _forward_block(
    kernel: BlockKernel,
    block: Block,
    q_NCD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    merged: MergedOutput,
    *,
    window: int | None,
    scale: float,
) -> None:
    shape = HeadShape(q_NCD.shape[0], k_TKD.shape[1], q_NCD.shape[2])
    q, k, v = _operands(block, q_NCD, k_TKD, v_TKD, shape)
    o, lse = kernel.forward(
        q,
        k,
        v,
        causal=block.kind is BlockKind.CAUSAL,
        mask=_band_mask(block, q_NCD, k_TKD, window),
        scale=scale,
    )
    rows = slice(block.q0, block.q1)
    merged.add(rows, _by_group(block, o, shape), _by_group(block, lse, shape))


def _backward_block(
    kernel: BlockKernel,
    block: Block,
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    k_TKD: Tensor,
    v_TKD: Tensor,
    totals: tuple[Tensor, Tensor, Tensor],
    *,
    window: int | None,
    scale: float,
) -> None:
    """Add the gradients of one block to ``totals``.

    Args:
        kernel: Kernel that computes the gradients.
        block: Block of the span to compute.
        rows: (do_NCD, q_NCD, o_NCD, lse_NC) of the span.
        k_TKD: Keys from the start of the sequence to the end of the span.
        v_TKD: Values, shaped like ``k_TKD``.
        totals: (dq_NCD, dk_TKD, dv_TKD), added to in place.
        window: Number of keys that a query sees; None for all.
        scale: Factor of the scores.
    """
    do_NCD, q_NCD, o_NCD, lse_NC = rows
    dq_NCD, dk_TKD, dv_TKD = totals
    shape = HeadShape(q_NCD.shape[0], k_TKD.shape[1], q_NCD.shape[2])
    q, k, v = _operands(block, q_NCD, k_TKD, v_TKD, shape)
    dq, dk, dv = kernel.backward(
        _rows(block, do_NCD, shape),
        q,
        k,
        v,
        _rows(block, o_NCD, shape),
        lse_NC[:, block.q0 : block.q1].reshape(q.shape[:-1]),
        causal=block.kind is BlockKind.CAUSAL,
        mask=_band_mask(block, q_NCD, k_TKD, window),
        scale=scale,
    )
    dq_KGCD = dq_NCD.view(shape.kv_heads, shape.group, *dq_NCD.shape[1:])
    _add(dq_KGCD[:, :, block.q0 : block.q1], _by_group(block, dq, shape))
    _add_keys(dk_TKD[block.k0 : block.k1], dk)
    _add_keys(dv_TKD[block.k0 : block.k1], dv)


def _rows(block: Block, x_NCD: Tensor, shape: HeadShape) -> Tensor:
    """Return a block's rows: ``[1, K, G*r, D]`` if FULL, ``[K, G, r, D]`` for the other kinds."""
    rows = x_NCD[:, block.q0 : block.q1]
    if block.kind is BlockKind.FULL:
        return rows.reshape(1, shape.kv_heads, -1, shape.head_size)
    return rows.view(shape.kv_heads, shape.group, block.num_queries, shape.head_size)


def _operands(
    block: Block, q_NCD: Tensor, k_TKD: Tensor, v_TKD: Tensor, shape: HeadShape
) -> tuple[Tensor, Tensor, Tensor]:
    q = _rows(block, q_NCD, shape)
    k, v = (x[block.k0 : block.k1].transpose(0, 1) for x in (k_TKD, v_TKD))
    if block.kind is BlockKind.FULL:
        return q, k.unsqueeze(0), v.unsqueeze(0)
    groups = (shape.kv_heads, shape.group, block.num_keys, shape.head_size)
    return q, k.unsqueeze(1).expand(groups), v.unsqueeze(1).expand(groups)


def _by_group(block: Block, x: Tensor, shape: HeadShape) -> Tensor:
    """Return rows of a block, ``[1, K, G*r, ...]`` or ``[K, G, r, ...]``, as ``[K, G, r, ...]``."""
    if block.kind is not BlockKind.FULL:
        return x
    return x[0].view(shape.kv_heads, shape.group, block.num_queries, *x.shape[3:])


def _add_keys(total_tKD: Tensor, gradient: Tensor) -> None:
    """Add ``[1, K, t, D]`` or ``[K, G, t, D]`` key gradients, summed over G in total's dtype."""
    total_KtD = total_tKD.transpose(0, 1)
    if gradient.shape[0] * gradient.shape[1] == total_KtD.shape[0]:
        _add(total_KtD, gradient.flatten(0, 1))
        return
    gradient_KtGD = gradient.transpose(1, 2)
    for tile in accumulation_tiles(gradient_KtGD):  # a sum in another dtype makes a cast copy
        total_KtD[tile].add_(gradient_KtGD[tile].sum(-2, dtype=total_tKD.dtype))


def _add(total: Tensor, gradient: Tensor) -> None:
    """Add ``gradient`` to ``total`` tile by tile, because adding makes a cast copy of it."""
    for tile in accumulation_tiles(gradient):
        total[tile].add_(gradient[tile])


def _band_mask(block: Block, q_NCD: Tensor, k_TKD: Tensor, window: int | None) -> Tensor | None:
    """Return the additive mask ``[1, 1, r, t]`` of a BAND block, None for the other kinds."""
    if block.kind is not BlockKind.BAND:
        return None
    assert window is not None, "a band block comes from a window"
    start = k_TKD.shape[0] - q_NCD.shape[1]
    query = torch.arange(start + block.q0, start + block.q1, device=q_NCD.device).unsqueeze(1)
    key = torch.arange(block.k0, block.k1, device=q_NCD.device)
    hidden = (key > query) | (key <= query - window)
    mask = torch.zeros(hidden.shape, dtype=q_NCD.dtype, device=q_NCD.device)
    return mask.masked_fill_(hidden, float("-inf"))[None, None]
