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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sppo.kernels.attention.blocks import (
    Block,
    BlockKind,
    attention_blocks,
    cut_to_token_multiples,
)
from sppo.kernels.attention.call import AttentionCall
from sppo.kernels.attention.merged_output import MergedOutput, tokens_first
from sppo.kernels.row_tiles import accumulation_tiles


@dataclass(frozen=True, slots=True, eq=False)
class BlockCall:
    """Attention of one block; all tensors are ``[batch, heads, tokens, D]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    mask: Tensor | None
    """Additive mask ``[1, 1, r, t]``, or None."""
    scale: float


class BlockKernel(Protocol):
    """Kernel of one block of attention."""

    def forward(self, call: BlockCall) -> tuple[Tensor, Tensor]:
        """Return (o like q, lse ``[batch, heads, r]`` in fp32 or better)."""
        ...

    def backward(
        self, call: BlockCall, do: Tensor, o: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) like q, k, v; ``o`` and ``lse`` are those over all keys."""
        ...


@dataclass(frozen=True, slots=True)
class BlockAttention:
    """Back end of attention over a :class:`BlockKernel`."""

    kernel: BlockKernel
    backward_multiple: Callable[[torch.dtype], int | None] = lambda dtype: None
    """Function of the tokens of which backward prefers whole multiples; None for no preference."""

    def forward(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Return (o_CND, lse_NC), computed in blocks that are merged by log-sum-exp."""
        q_NCD = _heads_first(call.q_CND)
        merged = MergedOutput(q_NCD, kv_heads=call.kv_heads)
        for block in _blocks(call):
            self._add_output(block, call, q_NCD, merged)
        del q_NCD
        return merged.result(call.q_CND.dtype)

    def backward(
        self,
        call: AttentionCall,
        do_CND: Tensor,
        o_CND: Tensor,
        lse_NC: Tensor,
        *,
        dk_TKD: Tensor,
        dv_TKD: Tensor,
    ) -> Tensor:
        """Return dq_CND, computed block by block; add to ``dk_TKD`` and ``dv_TKD``."""
        blocks = _blocks(call)
        multiple = self.backward_multiple(call.q_CND.dtype)
        if multiple is not None:
            blocks = cut_to_token_multiples(blocks, multiple, window=call.window)
        q_NCD, o_NCD, do_NCD = (_heads_first(x) for x in (call.q_CND, o_CND, do_CND))
        dq_NCD = torch.zeros_like(q_NCD, dtype=lse_NC.dtype)
        for block in blocks:
            self._add_gradients(
                block, call, (do_NCD, q_NCD, o_NCD, lse_NC), (dq_NCD, dk_TKD, dv_TKD)
            )
        del q_NCD, o_NCD, do_NCD
        return tokens_first(dq_NCD, call.q_CND.dtype)

    def _add_output(
        self, block: Block, call: AttentionCall, q_NCD: Tensor, merged: MergedOutput
    ) -> None:
        """Merge the output of one block; temporaries are freed on return."""
        o, lse = self.kernel.forward(_operands(block, call, q_NCD))
        merged.add(slice(block.q0, block.q1), _by_group(block, o), _by_group(block, lse))

    def _add_gradients(
        self,
        block: Block,
        call: AttentionCall,
        rows: tuple[Tensor, Tensor, Tensor, Tensor],
        totals: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Add the gradients of one block to ``totals``; temporaries are freed on return.

        Args:
            block: Block of the span to compute.
            call: Call of the span.
            rows: (do_NCD, q_NCD, o_NCD, lse_NC) of the span.
            totals: (dq_NCD, dk_TKD, dv_TKD), added to in place.
        """
        do_NCD, q_NCD, o_NCD, lse_NC = rows
        dq_NCD, dk_TKD, dv_TKD = totals
        operands = _operands(block, call, q_NCD)
        dq, dk, dv = self.kernel.backward(
            operands,
            _rows(block, do_NCD, call.kv_heads),
            _rows(block, o_NCD, call.kv_heads),
            lse_NC[:, block.q0 : block.q1].reshape(operands.q.shape[:-1]),
        )
        dq_KGCD = dq_NCD.view(call.kv_heads, -1, *dq_NCD.shape[1:])
        _add(dq_KGCD[:, :, block.q0 : block.q1], _by_group(block, dq))
        _add_keys(dk_TKD[block.k0 : block.k1], dk)
        _add_keys(dv_TKD[block.k0 : block.k1], dv)


def _blocks(call: AttentionCall) -> tuple[Block, ...]:
    return attention_blocks(
        call.num_queries,
        call.num_keys,
        window=call.window,
        document_starts=call.document_starts,
    )


def _heads_first(x_CND: Tensor) -> Tensor:
    return x_CND.transpose(0, 1).contiguous()


def _operands(block: Block, call: AttentionCall, q_NCD: Tensor) -> BlockCall:
    q = _rows(block, q_NCD, call.kv_heads)
    k, v = (x[block.k0 : block.k1].transpose(0, 1) for x in (call.k_TKD, call.v_TKD))
    if block.kind is BlockKind.FULL:
        k, v = k.unsqueeze(0), v.unsqueeze(0)
    else:
        k, v = (x.unsqueeze(1).expand(-1, q.shape[1], -1, -1) for x in (k, v))
    causal = block.kind is BlockKind.CAUSAL
    return BlockCall(q, k, v, causal, _band_mask(block, call), call.factor)


def _rows(block: Block, x_NCD: Tensor, kv_heads: int) -> Tensor:
    """Return a block's rows: ``[1, K, G*r, D]`` if FULL, ``[K, G, r, D]`` for the other kinds."""
    rows = x_NCD[:, block.q0 : block.q1]
    if block.kind is BlockKind.FULL:
        return rows.reshape(1, kv_heads, -1, rows.shape[2])
    return rows.view(kv_heads, -1, *rows.shape[1:])


def _by_group(block: Block, x: Tensor) -> Tensor:
    """Return rows of a block, ``[1, K, G*r, ...]`` or ``[K, G, r, ...]``, as ``[K, G, r, ...]``."""
    if block.kind is not BlockKind.FULL:
        return x
    return x[0].view(x.shape[1], -1, block.num_queries, *x.shape[3:])


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


def _band_mask(block: Block, call: AttentionCall) -> Tensor | None:
    """Return the additive mask ``[1, 1, r, t]`` of a BAND block, None for the other kinds."""
    if block.kind is not BlockKind.BAND:
        return None
    assert call.window is not None, "a band block comes from a window"
    start, device = call.num_keys - call.num_queries, call.q_CND.device
    query = torch.arange(start + block.q0, start + block.q1, device=device).unsqueeze(1)
    key = torch.arange(block.k0, block.k1, device=device)
    hidden = (key > query) | (key <= query - call.window)
    mask = torch.zeros(hidden.shape, dtype=call.q_CND.dtype, device=device)
    return mask.masked_fill_(hidden, float("-inf"))[None, None]
