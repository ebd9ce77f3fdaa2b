"""Attention of one subsequence over its whole prefix: one interface, several back ends."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from sppo.kernels.attention.blocks import attention_blocks, documents_in_span
from sppo.kernels.attention.call import AttentionCall
from sppo.kernels.attention.choice import KERNELS, AttentionCase, AttentionKernel, chosen_name


def attention_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return (o_CND in q's dtype, lse_NC in fp32, float64 for float64 inputs)."""
    return kernel_of(call).forward(call)


def attention_backward(
    call: AttentionCall,
    do_CND: Tensor,
    o_CND: Tensor,
    lse_NC: Tensor,
    *,
    dk_TKD: Tensor,
    dv_TKD: Tensor,
) -> Tensor:
    """Return the query gradient of :func:`attention_forward`; add the key and value gradients.

    Args:
        call: The call of forward.
        do_CND: Gradient of o.
        o_CND: Output of forward.
        lse_NC: Log-sum-exp that forward returned.
        dk_TKD: fp32 (float64) accumulator; the gradient of every visible key is *added*.
        dv_TKD: Accumulator of value gradients, like ``dk_TKD``.

    Returns:
        dq_CND in q's dtype.
    """
    return kernel_of(call).backward(call, do_CND, o_CND, lse_NC, dk_TKD=dk_TKD, dv_TKD=dv_TKD)


def kernel_of(call: AttentionCall) -> AttentionKernel:
    """Return the back end that computes a call."""
    case = AttentionCase(
        call.q_CND.device,
        call.q_CND.dtype,
        call.q_CND.shape[2],
        group=call.heads // call.kv_heads,
        window=call.window is not None,
        single_tokens=may_have_single_tokens(call.num_queries, call.num_keys, call.document_starts),
    )
    return KERNELS[chosen_name(case)]


@lru_cache(maxsize=256)
def may_have_single_tokens(queries: int, keys: int, document_starts: tuple[int, ...]) -> bool:
    """Return whether a span may have a block of one query or one key.

    A span of several documents may: it has blocks of any size. Documents that ended before the span
    do not count.
    """
    (first_key, _), *others = documents_in_span(keys - queries, keys, document_starts)
    blocks = () if others else attention_blocks(queries, keys - first_key)
    return not blocks or any(1 in (block.num_queries, block.num_keys) for block in blocks)
