"""Interface of attention back ends, and the back ends of blocks and of the definition.

Legend: C queries (the last C of T positions), T keys, N query heads, K key/value heads, D head
size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sppo.kernels.attention import block_attention
from sppo.kernels.attention import reference as attention_reference
from sppo.kernels.attention.blocks import Block, attention_blocks


class AttentionKernel(Protocol):
    """Back end of attention of a span over its prefix; causal, bottom-right aligned."""

    def forward(
        self,
        q_CND: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        *,
        scale: float,
        window: int | None,
        document_starts: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        """Return (o_CND in q's dtype, lse_NC in fp32 or better)."""
        ...

    def backward(
        self,
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
    ) -> Tensor:
        """Return dq_CND in q's dtype; add to ``dk_TKD`` and ``dv_TKD`` (fp32 or better)."""
        ...


class Reference:
    """Back end that computes the definition of attention, in quadratic memory."""

    def forward(
        self,
        q_CND: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        *,
        scale: float,
        window: int | None,
        document_starts: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        """Return (o_CND, lse_NC) by the definition of attention."""
        return attention_reference.forward(
            q_CND, k_TKD, v_TKD, window=window, document_starts=document_starts, scale=scale
        )

    def backward(
        self,
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
    ) -> Tensor:
        """Return dq_CND by autograd through the definition; add to ``dk_TKD`` and ``dv_TKD``."""
        del o_CND, lse_NC
        dq, dk, dv = attention_reference.backward(
            do_CND,
            q_CND,
            k_TKD,
            v_TKD,
            window=window,
            document_starts=document_starts,
            scale=scale,
        )
        dk_TKD.add_(dk)
        dv_TKD.add_(dv)
        return dq


@dataclass(frozen=True, slots=True)
class BlockAttention:
    """Back end over a kernel of blocks, see :mod:`sppo.kernels.attention.block_attention`."""

    kernel: block_attention.BlockKernel

    def forward(
        self,
        q_CND: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        *,
        scale: float,
        window: int | None,
        document_starts: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        """Return (o_CND, lse_NC), computed in blocks that are merged by log-sum-exp."""
        blocks = _blocks(q_CND, k_TKD, window, document_starts)
        return block_attention.forward(
            self.kernel, q_CND, k_TKD, v_TKD, blocks=blocks, window=window, scale=scale
        )

    def backward(
        self,
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
    ) -> Tensor:
        """Return dq_CND, computed block by block; add to ``dk_TKD`` and ``dv_TKD``."""
        return block_attention.backward(
            self.kernel,
            do_CND,
            q_CND,
            k_TKD,
            v_TKD,
            o_CND,
            lse_NC,
            dk_TKD=dk_TKD,
            dv_TKD=dv_TKD,
            blocks=_blocks(q_CND, k_TKD, window, document_starts),
            window=window,
            scale=scale,
        )


def _blocks(
    q_CND: Tensor, k_TKD: Tensor, window: int | None, document_starts: tuple[int, ...]
) -> tuple[Block, ...]:
    return attention_blocks(
        q_CND.shape[0], k_TKD.shape[0], window=window, document_starts=document_starts
    )
