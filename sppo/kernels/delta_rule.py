"""Gated delta rule (arXiv:2412.06464) from a state to a state.

Each value head has a matrix S, the state. Every token lets it decay, adds what v differs from what
S has at k, and reads it; consecutive value heads share q and k::

    S <- exp(g) S        S <- S + k (beta (v - S' k))'        o = S' q

At the start of a document S is zero. L consecutive tokens, a chunk, are taken together: all their
additions, the rows of ``delta``, solve one triangular system, and S passes from chunk to chunk. Of
all rows of a chunk, with ``.`` for the product of elements::

    (1 + strictly_lower(beta k k' . between)) [u, w] = beta [v, before . k]
    delta = u - w S        o = (before . q) S + (q k' . between) delta
    S <- whole S + (after . k)' delta

``before`` is the decay of S up to and with a row, ``after`` that from a row to the end of the
chunk, ``between`` that from one row to a later one, ``whole`` that of the chunk. Starts of
documents are masks of their logarithms, which are never positive. What does not depend on S is
left to autograd, and what does is explicit in both directions.

Legend: C tokens, H value heads, K key size, V value size; N chunks, J key heads, R value heads of
each (1 in a tensor that they share), L tokens of a chunk, B = N H.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sppo.kernels.elementwise import accumulation_dtype

CHUNK_TOKENS = 64
"""L: number of tokens of a chunk."""


class RuleInputs(NamedTuple):
    """Operands of the rule for consecutive tokens."""

    q_CJK: Tensor
    """Queries, scaled."""
    k_CJK: Tensor
    """Keys, of length 1."""
    v_CHV: Tensor
    """Values."""
    g_CH: Tensor
    """Logarithms of the decays, fp32 or better, never positive."""
    beta_CH: Tensor
    """Shares of the differences that are added, fp32 or better."""


def delta_rule(
    inputs: RuleInputs, state_HKV: Tensor, starts: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Return the outputs ``[C, H, V]``, in v's dtype, and the state after the last token.

    Autograd differentiates both. All is computed in fp32, or float64 for float64 operands.

    Args:
        inputs: Queries, keys, values, decays and shares of the tokens.
        state_HKV: State before the first token, fp32 or better.
        starts: Ascending indices of the tokens with which documents begin.
    """
    q, k, before, between, delta, states = _scan(inputs, state_HKV, starts)
    scores = between * (q @ k.mT)
    o_BLV = (before * q).flatten(0, 2) @ states[:-1].flatten(0, 1)
    o_BLV = torch.baddbmm(o_BLV, scores.flatten(0, 2), delta.flatten(0, 1))
    o_CHV = o_BLV.view_as(delta).movedim(2, 1).flatten(0, 1)[: len(inputs.v_CHV)]
    return o_CHV.to(inputs.v_CHV.dtype), states[-1].clone()


def state_after(inputs: RuleInputs, state_HKV: Tensor, starts: Sequence[int] = ()) -> Tensor:
    """Return the state after the last token, as :func:`delta_rule` does, and no outputs."""
    return _scan(inputs, state_HKV, starts)[-1][-1].clone()


def _scan(inputs: RuleInputs, state_HKV: Tensor, starts: Sequence[int]) -> tuple[Tensor, ...]:
    """Return q, k, before, between; delta ``[N, H, L, V]``; states before and after each chunk."""
    key_heads, dtype = inputs.k_CJK.shape[1], accumulation_dtype(inputs.v_CHV.dtype)
    q, k, v, g, beta = (_chunked(x, key_heads, dtype) for x in inputs)
    document = _documents(starts, len(g), g.device)
    total = g.cumsum(-2)
    before = _decay(total, document == 0)
    after = _decay(total[..., -1:, :] - total, document == document[..., -1:, :])
    between = _decay(total - total.mT, (document == document.mT).tril())
    system = beta * between * (k @ k.mT)
    right = torch.cat([beta * v, beta * before * k], -1)
    solution = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, w = torch.split(solution, [v.shape[-1], k.shape[-1]], -1)
    operands = (x.flatten(1, 2) for x in (u, w, after * k, before[..., -1:, :]))
    delta, states = _Scan.apply(*operands, state_HKV)  # type: ignore[no-untyped-call]
    return q, k, before, between, delta, states


class _Scan(torch.autograd.Function):
    """States before each chunk and after the last, one after another."""

    @staticmethod
    def forward(
        context: Any, u: Tensor, w: Tensor, kept: Tensor, whole: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (delta ``[N, H, L, V]``, states ``[N + 1, H, K, V]``)."""
        delta = torch.empty_like(u, memory_format=torch.contiguous_format)
        states = u.new_empty(len(u) + 1, *state.shape)
        states[0] = state
        for n in range(len(u)):
            torch.baddbmm(u[n], w[n], states[n], alpha=-1, out=delta[n])
            torch.baddbmm(whole[n] * states[n], kept[n].mT, delta[n], out=states[n + 1])
        context.save_for_backward(w, kept, whole, delta, states)
        return delta, states

    @staticmethod
    def backward(context: Any, ddelta: Tensor, dstates: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the operands, from the last chunk to the first."""
        w, kept, whole, delta, states = context.saved_tensors
        ddelta, dstates = ddelta.clone(), dstates.clone()
        for n in reversed(range(len(w))):
            ddelta[n].baddbmm_(kept[n], dstates[n + 1])
            dstates[n].addcmul_(whole[n], dstates[n + 1]).baddbmm_(w[n].mT, ddelta[n], alpha=-1)
        before, after, dstate = states[:-1], dstates[1:], dstates[0].clone()
        dw, dkept = -ddelta @ before.mT, delta @ after.mT
        dwhole = after.mul_(before).sum((-2, -1), keepdim=True)
        return ddelta, dw, dkept, dwhole, dstate


def _documents(starts: Sequence[int], chunks: int, device: torch.device) -> Tensor:
    """Return how many documents have begun in the chunk up to each row, ``[N, 1, 1, L, 1]``."""
    begins_T = torch.zeros(chunks * CHUNK_TOKENS, dtype=torch.int32, device=device)
    for start in starts:
        begins_T[start] = 1
    return begins_T.view(chunks, 1, 1, CHUNK_TOKENS, 1).cumsum(-2)


def _decay(log: Tensor, mask: Tensor) -> Tensor:
    """Return the exponential, and zero where the mask is false."""
    return log.masked_fill(~mask, -torch.inf).exp()


def _chunked(x_CH: Tensor, key_heads: int, dtype: torch.dtype) -> Tensor:
    """Return ``[N, J, R, L, ...]``, the last chunk filled up with zeros: tokens without effect."""
    missing = -len(x_CH) % CHUNK_TOKENS
    x_CHW = x_CH.reshape(*x_CH.shape[:2], -1).to(dtype)
    x_THW = functional.pad(x_CHW, (0, 0, 0, 0, 0, missing))
    x_NLJRW = x_THW.view(-1, CHUNK_TOKENS, key_heads, x_CH.shape[1] // key_heads, x_THW.shape[-1])
    return x_NLJRW.movedim(1, 3).contiguous()
