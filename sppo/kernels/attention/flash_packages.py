"""flash-attn 2, 3 and 4, and the copy of flash-attn 2 inside torch, as rectangle kernels.

Each is a package of its own with functions below its autograd classes that take and return lse.
They are imported where they are used. What is expected of them: flash-attn 2.7 or later, the
interfaces of flash-attn 3 with ``window_size_left``, of flash-attn 4 with ``return_lse``.
:mod:`sppo.kernels.attention.choice` tries each on a small case before it relies on it.

Legend: c queries, t keys, N query heads, K key/value heads, D head size; kernels take a batch of
one in front.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_Gradients = tuple[Tensor, Tensor, Tensor]


class TorchFlash:
    """``aten::_flash_attention_forward``, which is flash-attn 2."""

    def forward(
        self, q_cND: Tensor, k_tKD: Tensor, v_tKD: Tensor, *, window: int | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return (o_cND, lse_Nc) of one rectangle by the flash-attn 2 inside torch."""
        o, lse, *_ = torch.ops.aten._flash_attention_forward(
            q_cND.unsqueeze(0),
            k_tKD.unsqueeze(0),
            v_tKD.unsqueeze(0),
            None,
            None,
            q_cND.shape[0],
            k_tKD.shape[0],
            0.0,
            True,
            False,
            scale=scale,
            **_optional_window(window),
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
    ) -> _Gradients:
        """Return (dq, dk, dv) of one rectangle by the flash-attn 2 inside torch."""
        no_dropout = torch.empty(2, dtype=torch.uint64, device=q_cND.device)  # not looked at
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *(x.unsqueeze(0) for x in (do_cND, q_cND, k_tKD, v_tKD, o_cND, lse_Nc)),
            None,
            None,
            q_cND.shape[0],
            k_tKD.shape[0],
            0.0,
            causal,
            no_dropout,
            no_dropout[0],
            scale=scale,
            **_optional_window(window),
        )
        return dq[0], dk[0], dv[0]


class FlashAttn2:
    """Package ``flash_attn``."""

    def forward(
        self, q_cND: Tensor, k_tKD: Tensor, v_tKD: Tensor, *, window: int | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return (o_cND, lse_Nc) of one rectangle by flash-attn 2."""
        o, lse, *_ = _function("flash_attn.flash_attn_interface", "_flash_attn_forward")(
            *(x.unsqueeze(0) for x in (q_cND, k_tKD, v_tKD)),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=True,
            **_signed_window(window),
            softcap=0.0,
            alibi_slopes=None,
            return_softmax=False,
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
    ) -> _Gradients:
        """Return (dq, dk, dv) of one rectangle by flash-attn 2."""
        gradients = _empty(q_cND, k_tKD, v_tKD)
        _function("flash_attn.flash_attn_interface", "_flash_attn_backward")(
            *(x.unsqueeze(0) for x in (do_cND, q_cND, k_tKD, v_tKD, o_cND, lse_Nc)),
            *(x.unsqueeze(0) for x in gradients),
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
    """Package ``flash_attn_interface``, for compute capability 9.0."""

    def forward(
        self, q_cND: Tensor, k_tKD: Tensor, v_tKD: Tensor, *, window: int | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return (o_cND, lse_Nc) of one rectangle by flash-attn 3."""
        o, lse, *_ = _function("flash_attn_interface", "_flash_attn_forward")(
            *(x.unsqueeze(0) for x in (q_cND, k_tKD, v_tKD)),
            softmax_scale=scale,
            causal=True,
            **_signed_window(window),
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
    ) -> _Gradients:
        """Return (dq, dk, dv) of one rectangle by flash-attn 3."""
        gradients = _empty(q_cND, k_tKD, v_tKD)
        dq, dk, dv = (x.unsqueeze(0) for x in gradients)
        _function("flash_attn_interface", "_flash_attn_backward")(
            *(x.unsqueeze(0) for x in (do_cND, q_cND, k_tKD, v_tKD, o_cND, lse_Nc)),
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
    """Package ``flash_attn.cute``, for compute capabilities 9 to 11."""

    def forward(
        self, q_cND: Tensor, k_tKD: Tensor, v_tKD: Tensor, *, window: int | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return (o_cND, lse_Nc) of one rectangle by flash-attn 4."""
        o, lse, *_ = _function("flash_attn.cute.interface", "_flash_attn_fwd")(
            *(x.unsqueeze(0) for x in (q_cND, k_tKD, v_tKD)),
            softmax_scale=scale,
            causal=True,
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
    ) -> _Gradients:
        """Return (dq, dk, dv) of one rectangle by flash-attn 4."""
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


def _signed_window(window: int | None) -> dict[str, int]:
    """Keys to the left and right of a query's own; -1 for all."""
    if window is None:
        return {"window_size_left": -1, "window_size_right": -1}
    return {"window_size_left": window - 1, "window_size_right": 0}


def _optional_window(window: int | None) -> dict[str, int | None]:
    """Keys to the left and right of a query's own; None for all."""
    if window is None:
        return {"window_size_left": None, "window_size_right": None}
    return {"window_size_left": window - 1, "window_size_right": 0}


def _empty(q: Tensor, k: Tensor, v: Tensor) -> _Gradients:
    """Uninitialised, contiguous, like each operand."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv
