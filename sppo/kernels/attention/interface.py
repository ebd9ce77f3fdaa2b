"""Attention of one subsequence over its whole prefix: one interface, several back ends.

Legend: C queries (the last C of T positions), T keys, N query heads, K key/value heads, D head
size.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from torch import Tensor

from sppo.kernels.attention.blocks import attention_blocks, documents_in_span
from sppo.kernels.attention.choice import AttentionCase, BackendName, choose
from sppo.kernels.attention.kernel import AttentionKernel

Backend = Literal["auto"] | BackendName


def attention_forward(
    q_CND: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    document_starts: tuple[int, ...] = (0,),
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Return causal attention, bottom-right aligned: query i sees keys ``<= T - C + i``.

    Args:
        q_CND: Queries of the span.
        k_TKD: Keys from the start of the sequence to the end of the span; K divides N.
        v_TKD: Values, shaped like ``k_TKD``.
        scale: Factor of the scores; None for ``1/sqrt(D)``.
        window: Number of keys that a query sees, its own included; None for all.
        document_starts: Ascending positions in ``[0, T)``; a query sees its own document only.
        backend: Name of the back end; ``auto`` takes the first one that supports the call, see
            :mod:`sppo.kernels.attention.choice`.

    Returns:
        (o_CND in q's dtype, lse_NC in fp32, float64 for float64 inputs).

    Raises:
        ValueError: Shapes that do not fit together, or a back end that does not support the call.
    """
    _check(q_CND, k_TKD, v_TKD, window)
    kernel = _kernel(q_CND, k_TKD, window=window, document_starts=document_starts, backend=backend)
    return kernel.forward(
        q_CND,
        k_TKD,
        v_TKD,
        scale=q_CND.shape[-1] ** -0.5 if scale is None else scale,
        window=window,
        document_starts=document_starts,
    )


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
    scale: float | None = None,
    window: int | None = None,
    document_starts: tuple[int, ...] = (0,),
    backend: Backend = "auto",
) -> Tensor:
    """Return the query gradient of :func:`attention_forward`; add the key and value gradients.

    Args:
        do_CND: Gradient of o.
        q_CND: Queries, as in forward.
        k_TKD: Keys, as in forward.
        v_TKD: Values, as in forward.
        o_CND: Output of forward.
        lse_NC: Log-sum-exp that forward returned.
        dk_TKD: fp32 (float64) accumulator; the gradient of every visible key is *added*.
        dv_TKD: Accumulator of value gradients, like ``dk_TKD``.
        scale: Factor of the scores, as in forward.
        window: Number of keys that a query sees, as in forward.
        document_starts: Starts of documents, as in forward.
        backend: Name of the back end, as in forward.

    Returns:
        dq_CND in q's dtype.
    """
    _check(q_CND, k_TKD, v_TKD, window)
    kernel = _kernel(q_CND, k_TKD, window=window, document_starts=document_starts, backend=backend)
    return kernel.backward(
        do_CND,
        q_CND,
        k_TKD,
        v_TKD,
        o_CND,
        lse_NC,
        dk_TKD=dk_TKD,
        dv_TKD=dv_TKD,
        scale=q_CND.shape[-1] ** -0.5 if scale is None else scale,
        window=window,
        document_starts=document_starts,
    )


def _kernel(
    q_CND: Tensor,
    k_TKD: Tensor,
    *,
    window: int | None,
    document_starts: tuple[int, ...],
    backend: Backend,
) -> AttentionKernel:
    queries, heads, head_size = q_CND.shape
    case = AttentionCase(
        q_CND.device,
        q_CND.dtype,
        head_size,
        group=heads // k_TKD.shape[1],
        window=window is not None,
        single_tokens=may_have_single_tokens(queries, k_TKD.shape[0], document_starts),
    )
    return choose(backend, case)


@lru_cache(maxsize=256)
def may_have_single_tokens(queries: int, keys: int, document_starts: tuple[int, ...]) -> bool:
    """Return whether a span may have a block of one query or one key.

    A span of several documents may: it has blocks of any size. Documents that ended before the span
    do not count.
    """
    (first_key, _), *others = documents_in_span(keys - queries, keys, document_starts)
    blocks = () if others else attention_blocks(queries, keys - first_key)
    return not blocks or any(1 in (block.num_queries, block.num_keys) for block in blocks)


def _check(q_CND: Tensor, k_TKD: Tensor, v_TKD: Tensor, window: int | None) -> None:
    heads, kv_heads = q_CND.shape[1], k_TKD.shape[1]
    if heads % kv_heads or q_CND.shape[2] != k_TKD.shape[2] or k_TKD.shape != v_TKD.shape:
        raise ValueError(
            f"q {tuple(q_CND.shape)} does not fit k {tuple(k_TKD.shape)}, v {tuple(v_TKD.shape)}: "
            "heads must be a multiple of key/value heads, head sizes and k, v shapes equal"
        )
    if not 1 <= q_CND.shape[0] <= k_TKD.shape[0]:
        raise ValueError(f"a span of {q_CND.shape[0]} queries cannot end at key {k_TKD.shape[0]}")
    if window is not None and window < 1:
        raise ValueError(f"window {window} hides a query from itself; use at least 1")
