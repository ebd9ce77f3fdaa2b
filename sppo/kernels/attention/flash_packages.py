"""flash-attn 2, 3 and 4, and the copy of flash-attn 2 inside torch, as rectangle kernels.

Each version of flash-attn is a separate package; the functions below its autograd classes take and
return lse, and are imported at their first use. Required are flash-attn 2.7 or later, a flash-attn
3 with ``window_size_left``, and a flash-attn 4 with ``return_lse``.
:mod:`sppo.kernels.attention.choice` runs a small case before it chooses one of these kernels.

Legend: c queries, t keys, N query heads, K key/value heads, D head size; operands of the packages
have a leading batch dimension of one, or none if the offsets of documents are given.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from sppo.kernels.attention.document_offsets import DocumentOffsets

_Gradients = tuple[Tensor, Tensor, Tensor]


class TorchFlash:
    """Rectangle kernel over ``aten::_flash_attention_forward``, torch's copy of flash-attn 2."""

    takes_documents = True

    def forward(
        self,
        q_cND: Tensor,
        k_tKD: Tensor,
        v_tKD: Tensor,
        *,
        causal: bool,
        window: int | None,
        scale: float,
        documents: DocumentOffsets | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (o_cND, lse_Nc) of a rectangle, or its documents, by torch's flash-attn 2."""
        o, lse, *_ = torch.ops.aten._flash_attention_forward(
            *_batched(documents, q_cND, k_tKD, v_tKD),
            *_torch_offsets(documents, q_cND, k_tKD),
            0.0,
            causal,
            False,
            scale=scale,
            **_optional_window(window),
        )
        return _unbatched(documents, o), _unbatched(documents, lse)

    def backward(
        self,
        do_cND: Tensor,
        q_cND: Tensor,
        k_tKD: Tensor,
        v_tKD: Tensor,
        o_cND: Tensor,
        lse_Nc: Tensor,
        *,
        causal: bool,
        window: int | None,
        scale: float,
        documents: DocumentOffsets | None = None,
    ) -> _Gradients:
        """Return (dq, dk, dv) of a rectangle, or its documents, by torch's flash-attn 2."""
        no_dropout = torch.empty(2, dtype=torch.uint64, device=q_cND.device)  # never read
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *_batched(documents, do_cND, q_cND, k_tKD, v_tKD, o_cND, lse_Nc),
            *_torch_offsets(documents, q_cND, k_tKD),
            0.0,
            causal,
            no_dropout,
            no_dropout[0],
            scale=scale,
            **_optional_window(window),
        )
        dq, dk, dv = (_unbatched(documents, x) for x in (dq, dk, dv))
        return dq, dk, dv


class FlashAttn2:
    """Rectangle kernel over the package ``flash_attn`` (flash-attn 2)."""

    takes_documents = True

    def forward(
        self,
        q_cND: Tensor,
        k_tKD: Tensor,
        v_tKD: Tensor,
        *,
        causal: bool,
        window: int | None,
        scale: float,
        documents: DocumentOffsets | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (o_cND, lse_Nc) of one rectangle, or its documents, by flash-attn 2."""
        name = "_flash_attn_forward" if documents is None else "_flash_attn_varlen_forward"
        o, lse, *_ = _function("flash_attn.flash_attn_interface", name)(
            *_batched(documents, q_cND, k_tKD, v_tKD),
            **_package_offsets(documents),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
            **_signed_window(window),
            softcap=0.0,
            alibi_slopes=None,
            return_softmax=False,
        )
        return _unbatched(documents, o), _unbatched(documents, lse)

    def backward(
        self,
        do_cND: Tensor,
        q_cND: Tensor,
        k_tKD: Tensor,
        v_tKD: Tensor,
        o_cND: Tensor,
        lse_Nc: Tensor,
        *,
        causal: bool,
        window: int | None,
        scale: float,
        documents: DocumentOffsets | None = None,
    ) -> _Gradients:
        """Return (dq, dk, dv) of one rectangle, or its documents, by flash-attn 2."""
        gradients = _empty(q_cND, k_tKD, v_tKD)
        name = "_flash_attn_backward" if documents is None else "_flash_attn_varlen_backward"
        _function("flash_attn.flash_attn_interface", name)(
            *_batched(documents, do_cND, q_cND, k_tKD, v_tKD, o_cND, lse_Nc, *gradients),
            **_package_offsets(documents),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
            **_signed_window(window),
            softcap=0.0,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return gradients


class FlashAttn3:
    """Rectangle kernel over the package ``flash_attn_interface``, for compute capability 9.0."""

    takes_documents = True

    def forward(
        self,
        q_cND: Tensor,
        k_tKD: Tensor,
        v_tKD: Tensor,
        *,
        causal: bool,
        window: int | None,
        scale: float,
        documents: DocumentOffsets | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (o_cND, lse_Nc) of one rectangle, or its documents, by flash-attn 3."""
        o, lse, *_ = _function("flash_attn_interface", "_flash_attn_forward")(
            *_batched(documents, q_cND, k_tKD, v_tKD),
            **_package_offsets(documents),
            softmax_scale=scale,
            causal=causal,
            **_signed_window(window),
        )
        return _unbatched(documents, o), _unbatched(documents, lse)

    def backward(
        self,
        do_cND: Tensor,
        q_cND: Tensor,
        k_tKD: Tensor,
        v_tKD: Tensor,
        o_cND: Tensor,
        lse_Nc: Tensor,
        *,
        causal: bool,
        window: int | None,
        scale: float,
        documents: DocumentOffsets | None = None,
    ) -> _Gradients:
        """Return (dq, dk, dv) of one rectangle, or its documents, by flash-attn 3."""
        gradients = _empty(q_cND, k_tKD, v_tKD)
        dq, dk, dv = _batched(documents, *gradients)
        _function("flash_attn_interface", "_flash_attn_backward")(
            *_batched(documents, do_cND, q_cND, k_tKD, v_tKD, o_cND, lse_Nc),
            **_package_offsets(documents),
            dq=dq,
            dk=dk,
            dv=dv,
            softmax_scale=scale,
            is_causal=causal,
            **_signed_window(window),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return gradients


class FlashAttn4:
    """Rectangle kernel over the package ``flash_attn.cute``, for compute capabilities 9 to 11.

    Only recent versions support documents in backward, and not on every device: each call computes
    one document.
    """

    takes_documents = False

    def forward(
        self,
        q_cND: Tensor,
        k_tKD: Tensor,
        v_tKD: Tensor,
        *,
        causal: bool,
        window: int | None,
        scale: float,
        documents: DocumentOffsets | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (o_cND, lse_Nc) of one rectangle by flash-attn 4."""
        assert documents is None, "takes one document at a time"
        o, lse, *_ = _function("flash_attn.cute.interface", "_flash_attn_fwd")(
            *(x.unsqueeze(0) for x in (q_cND, k_tKD, v_tKD)),
            softmax_scale=scale,
            causal=causal,
            **_optional_window(window),
            return_lse=True,
        )
        return o[0], lse[0]

    def backward(
        self,
        do_cND: Tensor,
        q_cND: Tensor,
        k_tKD: Tensor,
        v_tKD: Tensor,
        o_cND: Tensor,
        lse_Nc: Tensor,
        *,
        causal: bool,
        window: int | None,
        scale: float,
        documents: DocumentOffsets | None = None,
    ) -> _Gradients:
        """Return (dq, dk, dv) of one rectangle by flash-attn 4."""
        assert documents is None, "takes one document at a time"
        dq, dk, dv, *_ = _function("flash_attn.cute.interface", "_flash_attn_bwd")(
            *(x.unsqueeze(0) for x in (q_cND, k_tKD, v_tKD, o_cND, do_cND, lse_Nc)),
            softmax_scale=scale,
            causal=causal,
            **_optional_window(window),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq[0], dk[0], dv[0]


def _function(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def _batched(documents: DocumentOffsets | None, *operands: Tensor) -> tuple[Tensor, ...]:
    """Return operands with a batch dimension of one, or unchanged if ``documents`` are given."""
    return operands if documents is not None else tuple(x.unsqueeze(0) for x in operands)


def _unbatched(documents: DocumentOffsets | None, result: Tensor) -> Tensor:
    """Return ``result`` without the batch dimension that :func:`_batched` added."""
    return result if documents is not None else result[0]


def _torch_offsets(
    documents: DocumentOffsets | None, q_cND: Tensor, k_tKD: Tensor
) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Return the arguments (cum_seq_q, cum_seq_k, max_q, max_k) of torch's operators."""
    if documents is None:
        return None, None, q_cND.shape[0], k_tKD.shape[0]
    return documents.queries, documents.keys, documents.most_queries, documents.most_keys


def _package_offsets(documents: DocumentOffsets | None) -> dict[str, Tensor | int]:
    """Return the packages' arguments for documents; none for one rectangle."""
    if documents is None:
        return {}
    return {
        "cu_seqlens_q": documents.queries,
        "cu_seqlens_k": documents.keys,
        "max_seqlen_q": documents.most_queries,
        "max_seqlen_k": documents.most_keys,
    }


def _signed_window(window: int | None) -> dict[str, int]:
    """Return the window arguments: keys to the left and right of a query's own; -1 for all."""
    if window is None:
        return {"window_size_left": -1, "window_size_right": -1}
    return {"window_size_left": window - 1, "window_size_right": 0}


def _optional_window(window: int | None) -> dict[str, int | None]:
    """Return the window arguments: keys to the left and right of a query's own; None for all."""
    if window is None:
        return {"window_size_left": None, "window_size_right": None}
    return {"window_size_left": window - 1, "window_size_right": 0}


def _empty(q: Tensor, k: Tensor, v: Tensor) -> _Gradients:
    """Return uninitialised contiguous gradients of q, k and v."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv
