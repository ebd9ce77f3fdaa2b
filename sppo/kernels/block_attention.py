"""Attention over a prefix, composed of blocks and merged by log-sum-exp.

Any kernel that takes a full rectangle, a causal square or a masked one, and returns the
log-sum-exp of each row, serves a whole subsequence this way. Partial outputs are merged in fp32:
``lse = log(exp(lse_1) + exp(lse_2))``, ``o = o_1 exp(lse_1 - lse) + o_2 exp(lse_2 - lse)``. In
backward each block uses the *global* lse and o, so its gradients are exact and simply add up.

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

from sppo.kernels.attention_blocks import Block, BlockKind


class BlockKernel(Protocol):
    """One rectangle of attention on one device; all tensors are ``[batch, heads, tokens, D]``."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """(o like q, lse ``[batch, heads, r]`` in fp32 or better)."""
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
        """(dq, dk, dv) like q, k, v; rows use the given global ``o`` and ``lse``."""
        ...


@dataclass(frozen=True, slots=True)
class Shape:
    """Head counts of one attention call."""

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
    """(o_CND in q's dtype, lse_NC in fp32 or better)."""
    shape = _shape(q_CND, k_TKD)
    q_NCD = q_CND.transpose(0, 1).contiguous()
    merged = _Merged(q_NCD)
    for block in blocks:
        q, k, v = _operands(block, q_NCD, k_TKD, v_TKD, shape)
        mask = _band_mask(block, q_CND, k_TKD, window)
        o, lse = kernel.forward(
            q, k, v, causal=block.kind is BlockKind.CAUSAL, mask=mask, scale=scale
        )
        rows = block.num_queries
        merged.add(block, o.reshape(shape.heads, rows, -1), lse.reshape(shape.heads, rows))
    o_NCD, lse_NC = merged.result()
    return o_NCD.to(q_CND.dtype).transpose(0, 1).contiguous(), lse_NC


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
    """dq_CND; adds into ``dk_TKD`` and ``dv_TKD`` (fp32 or better) in place."""
    shape = _shape(q_CND, k_TKD)
    q_NCD, o_NCD, do_NCD = (x.transpose(0, 1).contiguous() for x in (q_CND, o_CND, do_CND))
    dq_NCD = torch.zeros_like(q_NCD, dtype=lse_NC.dtype)
    for block in blocks:
        q, k, v = _operands(block, q_NCD, k_TKD, v_TKD, shape)
        o, do = (_rows(block, x, shape) for x in (o_NCD, do_NCD))
        lse = lse_NC[:, block.q0 : block.q1].reshape(q.shape[:-1])
        mask = _band_mask(block, q_CND, k_TKD, window)
        dq, dk, dv = kernel.backward(
            do, q, k, v, o, lse, causal=block.kind is BlockKind.CAUSAL, mask=mask, scale=scale
        )
        dq_NCD[:, block.q0 : block.q1] += dq.reshape(shape.heads, block.num_queries, -1)
        _add_keys(dk_TKD[block.k0 : block.k1], dk)
        _add_keys(dv_TKD[block.k0 : block.k1], dv)
    return dq_NCD.to(q_CND.dtype).transpose(0, 1).contiguous()


class _Merged:
    """Running output of a span: ``o`` and ``lse`` over the blocks seen so far."""

    def __init__(self, q_NCD: Tensor) -> None:
        wide = torch.promote_types(q_NCD.dtype, torch.float32)
        self._o = torch.empty_like(q_NCD, dtype=wide)
        self._lse = torch.empty(q_NCD.shape[:-1], dtype=wide, device=q_NCD.device)
        self._seen = [False] * q_NCD.shape[1]

    def add(self, block: Block, o_NrD: Tensor, lse_Nr: Tensor) -> None:
        """Merge one block; rows seen for the first time are copied."""
        rows = slice(block.q0, block.q1)
        seen = set(self._seen[rows])
        assert len(seen) == 1, f"rows of {block} were merged unevenly"
        o, lse = self._o[:, rows], self._lse[:, rows]
        if not seen.pop():
            o.copy_(o_NrD)
            lse.copy_(lse_Nr)
            self._seen[rows] = [True] * block.num_queries
            return
        both = torch.logaddexp(lse, lse_Nr)
        o.mul_((lse - both).exp_().unsqueeze(-1))
        o.add_(o_NrD * (lse_Nr - both).exp_().unsqueeze(-1))
        lse.copy_(both)

    def result(self) -> tuple[Tensor, Tensor]:
        """(o, lse) of all rows."""
        assert all(self._seen), "every query sees at least itself"
        return self._o, self._lse


def _shape(q_CND: Tensor, k_TKD: Tensor) -> Shape:
    return Shape(q_CND.shape[1], k_TKD.shape[1], q_CND.shape[2])


def _rows(block: Block, x_NCD: Tensor, shape: Shape) -> Tensor:
    """Rows of a block: ``[1, K, G*r, D]`` for a rectangle, ``[K, G, r, D]`` for a masked square."""
    rows = x_NCD[:, block.q0 : block.q1]
    if block.kind is BlockKind.FULL:
        return rows.reshape(1, shape.kv_heads, -1, shape.head_size)
    return rows.view(shape.kv_heads, shape.group, block.num_queries, shape.head_size)


def _operands(
    block: Block, q_NCD: Tensor, k_TKD: Tensor, v_TKD: Tensor, shape: Shape
) -> tuple[Tensor, Tensor, Tensor]:
    q = _rows(block, q_NCD, shape)
    k, v = (x[block.k0 : block.k1].transpose(0, 1) for x in (k_TKD, v_TKD))
    if block.kind is BlockKind.FULL:
        return q, k.unsqueeze(0), v.unsqueeze(0)
    groups = (shape.kv_heads, shape.group, block.num_keys, shape.head_size)
    return q, k.unsqueeze(1).expand(groups), v.unsqueeze(1).expand(groups)


def _add_keys(target_tKD: Tensor, gradient: Tensor) -> None:
    """Add ``[1, K, t, D]`` or ``[K, G, t, D]`` key gradients, summed over the group, in fp32."""
    if gradient.shape[0] == 1 and gradient.shape[1] == target_tKD.shape[1]:
        target_tKD.add_(gradient[0].transpose(0, 1))
    else:
        target_tKD.add_(gradient.sum(1, dtype=target_tKD.dtype).transpose(0, 1))


def _band_mask(block: Block, q_CND: Tensor, k_TKD: Tensor, window: int | None) -> Tensor | None:
    """Additive mask ``[1, 1, r, t]`` of a band block, None for the other kinds."""
    if block.kind is not BlockKind.BAND:
        return None
    assert window is not None, "a band block comes from a window"
    start = k_TKD.shape[0] - q_CND.shape[0]
    query = torch.arange(start + block.q0, start + block.q1, device=q_CND.device).unsqueeze(1)
    key = torch.arange(block.k0, block.k1, device=q_CND.device)
    hidden = (key > query) | (key <= query - window)
    mask = torch.zeros(hidden.shape, dtype=q_CND.dtype, device=q_CND.device)
    return mask.masked_fill_(hidden, float("-inf"))[None, None]
