"""Gated delta rule of :mod:`sppo.kernels.delta_rule` in torch, chunk by chunk.

All additions to the state in a chunk of L tokens, the rows of ``delta``, solve one triangular
system, and the state S passes from chunk to chunk. Of all rows of a chunk, with ``.`` for the
product of elements::

    (1 + strictly_lower(beta k k' . between)) [u, w] = beta [v, before . k]
    delta = u - w S        o = (before . q) S + (q k' . between) delta
    S <- whole S + (after . k)' delta

``before`` is the decay of S up to and with a row, ``after`` that from a row to the end of the
chunk, ``between`` that from one row to a later one, ``whole`` that of the chunk. Starts of
documents are masks of their logarithms, which are never positive. What does not depend on S is
left to autograd, and what does is explicit in both directions.

Legend: C tokens, H value heads, K key size, V value size; N chunks, J key heads, R value heads of
each (1 in a tensor that they share), L = CHUNK_TOKENS tokens of a chunk, B = N H.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sppo.cost.tiles import CHUNK_TOKENS


class RuleOperands(NamedTuple):
    """Operands of the rule for consecutive tokens of a sequence."""

    q_CJK: Tensor
    """Queries, scaled."""
    k_CJK: Tensor
    """Keys, of length 1."""
    v_CHV: Tensor
    """Values."""
    g_CH: Tensor
    """Logarithms of the decays, never positive, in the dtype of the state."""
    beta_CH: Tensor
    """Shares of the differences that are added, in the dtype of the state."""
    state_HKV: Tensor
    """State before the first token, in fp32 or float64, in which all is computed."""
    starts: Sequence[int] = ()
    """Ascending indices of the tokens with which documents begin, from a state of zeros."""


def chunked_rule(x: RuleOperands) -> tuple[Tensor, Tensor]:
    """Return the outputs ``[C, H, V]``, in v's dtype, and the state after the last token."""
    q, k, before, between, delta, states, last = _scan(x)
    o_BLV = (before * q).flatten(0, 2) @ states.flatten(0, 1)
    scores_BLL = (between * (q @ k.mT)).flatten(0, 2)
    o_BLV = torch.baddbmm(o_BLV, scores_BLL, delta.flatten(0, 1))
    o_CHV = o_BLV.view_as(delta).movedim(2, 1).flatten(0, 1)[: len(x.v_CHV)]
    return o_CHV.to(x.v_CHV.dtype), last


def chunked_state(x: RuleOperands) -> Tensor:
    """Return the state after the last token, without the outputs."""
    return _scan(x)[-1]


def _scan(x: RuleOperands) -> tuple[Tensor, ...]:
    """Return q, k, before and between in chunks, and delta and the states of :class:`_Scan`."""
    q, k, v, g, beta = (_chunked(operand, x) for operand in x[:5])
    document = _documents(x.starts, len(g), g.device)
    total = g.cumsum(-2)
    before = _decay(total, document == 0)
    after = _decay(total[..., -1:, :] - total, document == document[..., -1:, :])
    between = _decay(total - total.mT, (document == document.mT).tril())
    system = beta * between * (k @ k.mT)
    right = torch.cat([beta * v, beta * before * k], -1)
    solution = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, w = torch.split(solution, [v.shape[-1], k.shape[-1]], -1)
    by_head = (part.flatten(1, 2) for part in (u, w, after * k, before[..., -1:, :]))
    of_scan = _Scan.apply(*by_head, x.state_HKV)  # type: ignore[no-untyped-call]
    return q, k, before, between, *of_scan


class _Scan(torch.autograd.Function):
    """Additions to the state, and the state before each chunk and after the last."""

    @staticmethod
    def forward(
        context: Any, u: Tensor, w: Tensor, kept: Tensor, whole: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (delta ``[N, H, L, V]``, states ``[N, H, K, V]``, the last one ``[H, K, V]``)."""
        delta = torch.empty_like(u, memory_format=torch.contiguous_format)
        states = u.new_empty(len(u) + 1, *state.shape)
        states[0] = state
        for n in range(len(u)):
            torch.baddbmm(u[n], w[n], states[n], alpha=-1, out=delta[n])
            torch.baddbmm(whole[n] * states[n], kept[n].mT, delta[n], out=states[n + 1])
        context.save_for_backward(w, kept, whole, delta, states)
        return delta, states[:-1], states[-1].clone()

    @staticmethod
    def backward(
        context: Any, ddelta: Tensor, dbefore: Tensor, dlast: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the gradients of the operands, from the last chunk to the first."""
        w, kept, whole, delta, states = context.saved_tensors
        ddelta, dstates = ddelta.clone(), torch.cat([dbefore, dlast[None]])
        for n in reversed(range(len(w))):
            ddelta[n].baddbmm_(kept[n], dstates[n + 1])
            dstates[n].addcmul_(whole[n], dstates[n + 1]).baddbmm_(w[n].mT, ddelta[n], alpha=-1)
        before, after, dstate = states[:-1], dstates[1:], dstates[0].clone()
        dw, dkept = -ddelta @ before.mT, delta @ after.mT
        dwhole = after.mul_(before).sum((-2, -1), keepdim=True)
        return ddelta, dw, dkept, dwhole, dstate


def document_begins(starts: Sequence[int], tokens: int, device: torch.device) -> Tensor:
    """Return 1 for each token that begins a document, else 0, int32 ``[tokens]``, by one copy."""
    if not starts:
        return torch.zeros(tokens, dtype=torch.int32, device=device)
    begins_T = torch.zeros(tokens, dtype=torch.int32, pin_memory=device.type == "cuda")
    begins_T[torch.tensor(starts)] = 1
    return begins_T.to(device, non_blocking=True)


def _documents(starts: Sequence[int], chunks: int, device: torch.device) -> Tensor:
    """Return how many documents have begun in the chunk up to each row, ``[N, 1, 1, L, 1]``."""
    begins_T = document_begins(starts, chunks * CHUNK_TOKENS, device)
    return begins_T.view(chunks, 1, 1, CHUNK_TOKENS, 1).cumsum(-2)


def _decay(log: Tensor, mask: Tensor) -> Tensor:
    """Return the exponential, and zero where the mask is false."""
    return log.masked_fill(~mask, -torch.inf).exp()


def _chunked(operand_CH: Tensor, x: RuleOperands) -> Tensor:
    """Return ``[N, J, R, L, ...]``, the last chunk filled up with zeros: tokens without effect."""
    tokens, heads = operand_CH.shape[:2]
    wide_CHW = operand_CH.reshape(tokens, heads, -1).to(x.state_HKV.dtype)
    filled_THW = functional.pad(wide_CHW, (0, 0, 0, 0, 0, -tokens % CHUNK_TOKENS))
    key_heads = x.k_CJK.shape[1]
    sizes = -1, CHUNK_TOKENS, key_heads, heads // key_heads, filled_THW.shape[-1]
    return filled_THW.view(sizes).movedim(1, 3).contiguous()
