"""Gated delta rule (arXiv:2412.06464), explicit forward and backward, from a state to a state.

Each value head has a matrix S, the state. Every token lets it decay, adds what v differs from what
S has at k, and reads it; consecutive value heads share q and k::

    S <- exp(g) S        S <- S + k (beta (v - S' k))'        o = S' q

At the start of a document S is zero. L consecutive tokens, a chunk, are taken together: all their
additions, the rows of ``delta``, solve one triangular system, and S passes from chunk to chunk. Of
all rows of a chunk, with ``.`` for the product of elements and ``between`` for the decay from
one row to a later one::

    (1 + strictly_lower(beta k k' . between)) [u, w] = beta [v, before . k]
    delta = u - w S      o = (before . q) S + (q k' . between) delta
    S <- whole S + (after . k)' delta

``before`` is the decay of S up to and with a row, ``after`` that from a row to the end of the
chunk. Starts of documents are masks of these decays, applied to their logarithms, which are never
positive.

All is computed in fp32, or float64 for float64 operands. A call needs about ``4 (8 K + 6 V + 6 L)``
bytes for each token and value head in forward, and twice that in backward.

Legend: C tokens, H value heads, K key size, V value size; N chunks, J key heads, R value heads of
each (1 in a tensor that they share), L tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from sppo.kernels.elementwise import accumulation_dtype

CHUNK_TOKENS = 64
"""L: number of tokens of a chunk."""


class RuleInputs(NamedTuple):
    """Operands of the rule for consecutive tokens, or the gradients of these operands."""

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

    Args:
        inputs: Operands.
        state_HKV: State before the first token, fp32 or better.
        starts: Ascending indices of the tokens with which documents begin.
    """
    x = _Chunks.of(inputs, starts)
    states, delta = _scan(x, state_HKV)
    o = (x.before * x.q) @ states[:-1] + (x.qk * x.between) @ delta
    return _tokens(o, inputs.v_CHV), states[-1].flatten(0, 1)


def delta_rule_backward(
    do_CHV: Tensor,
    dlast_HKV: Tensor,
    inputs: RuleInputs,
    state_HKV: Tensor,
    starts: Sequence[int] = (),
) -> tuple[RuleInputs, Tensor]:
    """Return the gradients of the operands, in their dtypes, and of the state before.

    Args:
        do_CHV: Gradient of the outputs.
        dlast_HKV: Gradient of the state after the last token, fp32 or better.
        inputs: Operands of :func:`delta_rule`.
        state_HKV: State before the first token, fp32 or better.
        starts: Ascending indices of the tokens with which documents begin.
    """
    x = _Chunks.of(inputs, starts)
    states, delta = _scan(x, state_HKV)
    do = _chunked(do_CHV, x.k.shape[1], x.v.dtype)
    dstates, ddelta = _reverse_scan(x, do, dlast_HKV)
    dread, dkept = do @ states[:-1].mT, delta @ dstates[1:].mT
    solved = torch.linalg.solve_triangular(
        x.system.mT,
        torch.cat([ddelta, -ddelta @ states[:-1].mT], -1),
        upper=True,
        unitriangular=True,
    )
    dv, dw = solved.split([x.v.shape[-1], x.k.shape[-1]], -1)
    dsystem = (solved @ x.uw.mT).neg_().tril_(-1).mul_(x.between)
    dscores = (do @ delta.mT).mul_(x.between)

    dbeta = _row_sums(dv * x.v) + x.before * _row_sums(dw * x.k) + _row_sums(dsystem * x.kk)
    dsystem *= x.beta
    kept = _row_sums(x.after * dkept * x.k)
    pairs = dscores * x.qk + dsystem * x.kk
    dlog = _row_sums(pairs) - _row_sums(pairs.mT) - kept
    dlog += x.before * (_row_sums(dread * x.q) + x.beta * _row_sums(dw * x.k))
    dwhole = (states[:-1] * dstates[1:]).sum((-2, -1), keepdim=True)
    dlog[..., -1:, :] += kept.sum(-2, keepdim=True) + x.whole * dwhole

    to_queries, to_keys = (d.sum(2, keepdim=True) for d in (dscores, dsystem))
    dq = (x.before * dread).sum(2, keepdim=True) + to_queries @ x.k
    dk = (x.beta * x.before * dw + x.after * dkept).sum(2, keepdim=True)
    dk += to_queries.mT @ x.q + (to_keys + to_keys.mT) @ x.k
    dg = dlog.flip(-2).cumsum(-2).flip(-2)
    found = dq, dk, x.beta * dv, dg.squeeze(-1), dbeta.squeeze(-1)
    return RuleInputs(*map(_tokens, found, inputs)), dstates[0].flatten(0, 1)


@dataclass(frozen=True)
class _Chunks:
    """Operands in chunks, and what follows from them without the state."""

    q: Tensor
    """``[N, J, 1, L, K]``"""
    k: Tensor
    """``[N, J, 1, L, K]``"""
    v: Tensor
    """``[N, J, R, L, V]``"""
    beta: Tensor
    """``[N, J, R, L, 1]``"""
    before: Tensor
    """Decay of the state up to and with each row, ``[N, J, R, L, 1]``; 0 from the start of a
    document on."""
    after: Tensor
    """Decay from each row to the end of the chunk, ``[N, J, R, L, 1]``."""
    between: Tensor
    """Decay from the row of a column to each row, ``[N, J, R, L, L]``, zero above the diagonal."""

    @classmethod
    def of(cls, inputs: RuleInputs, starts: Sequence[int]) -> _Chunks:
        """Return the chunks of some tokens, the last one filled up with tokens without effect."""
        heads, dtype = inputs.k_CJK.shape[1], accumulation_dtype(inputs.v_CHV.dtype)
        q, k, v, g, beta = (_chunked(x, heads, dtype) for x in inputs)
        document = _documents(starts, g.shape[0], g.device)[:, None, None]
        same = document.unsqueeze(-1) == document.unsqueeze(-2)
        total = g.cumsum(-1)
        before = _decay(total, document == 0)
        after = _decay(total[..., -1:] - total, document == document[..., -1:])
        between = _decay(total.unsqueeze(-1) - total.unsqueeze(-2), same.tril())
        return cls(q, k, v, *(x.unsqueeze(-1) for x in (beta, before, after)), between)

    @cached_property
    def whole(self) -> Tensor:
        """Decay over each chunk, ``[N, J, R, 1, 1]``."""
        return self.before[..., -1:, :]

    @cached_property
    def kk(self) -> Tensor:
        """Products of keys, ``[N, J, 1, L, L]``."""
        return self.k @ self.k.mT

    @cached_property
    def qk(self) -> Tensor:
        """Products of queries and keys, ``[N, J, 1, L, L]``."""
        return self.q @ self.k.mT

    @cached_property
    def system(self) -> Tensor:
        """Matrix of the system; only what is below its diagonal counts, ``[N, J, R, L, L]``."""
        return self.beta * self.between * self.kk

    @cached_property
    def uw(self) -> Tensor:
        """Solution [u, w], ``[N, J, R, L, V + K]``."""
        right = torch.cat([self.beta * self.v, self.beta * self.before * self.k], -1)
        return torch.linalg.solve_triangular(self.system, right, upper=False, unitriangular=True)


def _scan(x: _Chunks, state_HKV: Tensor) -> tuple[Tensor, Tensor]:
    """Return (states before each chunk and after the last, delta), ``[N, J, R, ...]``."""
    u, w = (part.flatten(1, 2) for part in x.uw.split([x.v.shape[-1], x.k.shape[-1]], -1))
    kept, whole = (x.after * x.k).flatten(1, 2), x.whole.flatten(1, 2)
    delta = torch.empty_like(u, memory_format=torch.contiguous_format)
    states = delta.new_empty(len(u) + 1, *state_HKV.shape)
    states[0] = state_HKV
    for n in range(len(u)):
        torch.baddbmm(u[n], w[n], states[n], alpha=-1, out=delta[n])
        torch.baddbmm(whole[n] * states[n], kept[n].mT, delta[n], out=states[n + 1])
    heads = x.v.shape[1:3]
    return states.unflatten(1, heads), delta.unflatten(1, heads)


def _reverse_scan(x: _Chunks, do: Tensor, dlast_HKV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the states, as in :func:`_scan`, and of delta."""
    w = x.uw[..., x.v.shape[-1] :].flatten(1, 2)
    kept, whole = (x.after * x.k).flatten(1, 2), x.whole.flatten(1, 2)
    ddelta = ((x.qk * x.between).mT @ do).flatten(1, 2)
    dread = ((x.before * x.q).mT @ do).flatten(1, 2)
    dstates = torch.cat([dread, dlast_HKV[None]])
    for n in reversed(range(len(w))):
        ddelta[n].baddbmm_(kept[n], dstates[n + 1])
        dstates[n].addcmul_(whole[n], dstates[n + 1]).baddbmm_(w[n].mT, ddelta[n], alpha=-1)
    heads = x.v.shape[1:3]
    return dstates.unflatten(1, heads), ddelta.unflatten(1, heads)


def _documents(starts: Sequence[int], chunks: int, device: torch.device) -> Tensor:
    """Return how many documents have begun in each chunk up to and with each token, ``[N, L]``."""
    begins_T = torch.zeros(chunks * CHUNK_TOKENS, dtype=torch.int32, device=device)
    for start in starts:
        begins_T[start] = 1
    return begins_T.view(chunks, CHUNK_TOKENS).cumsum(-1)


def _decay(log: Tensor, counts: Tensor) -> Tensor:
    """Return the exponential where ``counts``, elsewhere zero."""
    return log.masked_fill(~counts, -torch.inf).exp()


def _row_sums(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def _chunked(x_CH: Tensor, key_heads: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor of tokens and heads in chunks, ``[N, J, R, L, ...]``, filled with zeros."""
    tokens = x_CH.shape[0]
    chunks = -(-tokens // CHUNK_TOKENS)
    x_TH = x_CH.new_zeros(chunks * CHUNK_TOKENS, *x_CH.shape[1:], dtype=dtype)
    x_TH[:tokens] = x_CH
    x_NLJR = x_TH.unflatten(0, (chunks, CHUNK_TOKENS)).unflatten(2, (key_heads, -1))
    return x_NLJR.movedim(1, 3).contiguous()


def _tokens(x_NJRL: Tensor, like_CH: Tensor) -> Tensor:
    """Return chunks as a tensor of tokens and heads, in the shape and dtype of another."""
    x_TH = x_NJRL.movedim(3, 1).flatten(2, 3).flatten(0, 1)
    return x_TH[: like_CH.shape[0]].to(like_CH.dtype)
