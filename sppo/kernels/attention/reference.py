"""Attention by its definition, with autograd for the gradient: the reference of all back ends.

The whole score matrix is materialised, so the module is for tests and tiny problems only.

Legend: C queries, T keys, N query heads, K key/value heads, G = N/K, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def visible_pairs(
    num_queries: int, num_keys: int, *, window: int | None, document_starts: tuple[int, ...]
) -> Tensor:
    """Return a boolean ``[C, T]``: whether each of the last C positions sees each key."""
    key = torch.arange(num_keys)
    query = key[num_keys - num_queries :].unsqueeze(1)
    starts = torch.tensor(sorted({0, *document_starts}))
    document = torch.searchsorted(starts, key, right=True)
    visible = (key <= query) & (document == document[num_keys - num_queries :].unsqueeze(1))
    return visible if window is None else visible & (key > query - window)


def forward(
    q_CND: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    *,
    window: int | None,
    document_starts: tuple[int, ...],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return (o_CND in q's dtype, lse_NC) of causal attention, computed in fp32 or better."""
    acc_dtype = torch.promote_types(q_CND.dtype, torch.float32)
    group = q_CND.shape[1] // k_TKD.shape[1]
    k_TND, v_TND = (x.to(acc_dtype).repeat_interleave(group, dim=1) for x in (k_TKD, v_TKD))
    scores_NCT = torch.einsum("cnd,tnd->nct", q_CND.to(acc_dtype), k_TND) * scale
    visible = visible_pairs(
        q_CND.shape[0], k_TKD.shape[0], window=window, document_starts=document_starts
    )
    scores_NCT = scores_NCT.masked_fill(~visible.to(q_CND.device), float("-inf"))
    lse_NC = scores_NCT.logsumexp(-1)
    weights_NCT = (scores_NCT - lse_NC.unsqueeze(-1)).exp()
    return torch.einsum("nct,tnd->cnd", weights_NCT, v_TND).to(q_CND.dtype), lse_NC


def backward(
    do_CND: Tensor,
    q_CND: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    *,
    window: int | None,
    document_starts: tuple[int, ...],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq_CND, dk_TKD, dv_TKD) by autograd through :func:`forward`."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (q_CND, k_TKD, v_TKD)]
        o, _ = forward(*inputs, window=window, document_starts=document_starts, scale=scale)
        dq, dk, dv = torch.autograd.grad(o, inputs, do_CND)
    return dq, dk, dv
