"""Attention of one subsequence over everything before it: one interface, several back ends.

Legend: C queries (the last C of T positions), T keys, N query heads, K key/value heads, D head
size.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from sppo.kernels import attention_reference, block_attention
from sppo.kernels.attention_blocks import Block, attention_blocks
from sppo.kernels.cpu_flash import CpuFlash

Backend = Literal["auto", "cpu_flash", "reference"]

_log = logging.getLogger(__name__)
_KERNELS = {"cpu_flash": CpuFlash()}


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
    """Causal attention, bottom-right aligned: query i of the span sees keys ``<= T - C + i``.

    Args:
        q_CND: queries of the span.
        k_TKD: keys from the start of the sequence to the end of the span; K divides N.
        v_TKD: values, like ``k_TKD``.
        scale: of the scores; None for ``1/sqrt(D)``.
        window: keys a query sees, itself included; None for all.
        document_starts: ascending positions in ``[0, T)``; a query sees its own document only.
        backend: ``auto`` takes the fastest that runs here.

    Returns:
        (o_CND in q's dtype, lse_NC in fp32, float64 for float64 inputs).

    Raises:
        ValueError: shapes that do not belong together, or a backend that cannot run here.
    """
    _check(q_CND, k_TKD, v_TKD)
    chosen = _choose(backend, q_CND.device.type)
    scale = q_CND.shape[-1] ** -0.5 if scale is None else scale
    blocks = _blocks(q_CND, k_TKD, window, document_starts)
    if chosen == "reference":
        return attention_reference.forward(
            q_CND, k_TKD, v_TKD, window=window, document_starts=document_starts, scale=scale
        )
    return block_attention.forward(
        _KERNELS[chosen], q_CND, k_TKD, v_TKD, blocks=blocks, window=window, scale=scale
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
    """Gradient of :func:`attention_forward`.

    Args:
        do_CND: gradient of o.
        q_CND: as in forward, like ``k_TKD``, ``v_TKD`` and the keyword arguments.
        k_TKD: see ``q_CND``.
        v_TKD: see ``q_CND``.
        o_CND: what forward returned.
        lse_NC: what forward returned.
        dk_TKD: fp32 (float64) accumulator; the gradient of every visible key is *added*.
        dv_TKD: like ``dk_TKD``.
        scale: as in forward.
        window: as in forward.
        document_starts: as in forward.
        backend: as in forward.

    Returns:
        dq_CND in q's dtype.
    """
    _check(q_CND, k_TKD, v_TKD)
    chosen = _choose(backend, q_CND.device.type)
    scale = q_CND.shape[-1] ** -0.5 if scale is None else scale
    blocks = _blocks(q_CND, k_TKD, window, document_starts)
    if chosen == "reference":
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
    return block_attention.backward(
        _KERNELS[chosen],
        do_CND,
        q_CND,
        k_TKD,
        v_TKD,
        o_CND,
        lse_NC,
        dk_TKD=dk_TKD,
        dv_TKD=dv_TKD,
        blocks=blocks,
        window=window,
        scale=scale,
    )


def _blocks(
    q_CND: Tensor, k_TKD: Tensor, window: int | None, document_starts: tuple[int, ...]
) -> tuple[Block, ...]:
    return attention_blocks(
        q_CND.shape[0], k_TKD.shape[0], window=window, document_starts=document_starts
    )


def _check(q_CND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
    heads, kv_heads = q_CND.shape[1], k_TKD.shape[1]
    if heads % kv_heads or q_CND.shape[2] != k_TKD.shape[2] or k_TKD.shape != v_TKD.shape:
        raise ValueError(
            f"q {tuple(q_CND.shape)} does not fit k {tuple(k_TKD.shape)}, v {tuple(v_TKD.shape)}: "
            "heads must be a multiple of key/value heads, head sizes and k, v shapes equal"
        )


@lru_cache(maxsize=16)
def _choose(backend: Backend, device: str) -> str:
    """The back end that serves; the choice is logged once per device."""
    if backend == "cpu_flash" and device != "cpu":
        raise ValueError(f"attention back end cpu_flash runs on cpu, tensors are on {device}")
    if backend != "auto":
        return backend
    chosen = "cpu_flash" if device == "cpu" else "reference"
    _log.info("attention back end on %s: %s (torch %s)", device, chosen, torch.__version__)
    return chosen
