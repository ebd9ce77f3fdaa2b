"""Convolution and gated delta rule of a layer with linear attention, from a state to a state.

Queries, keys and values pass a causal convolution of each channel, then the rule, which is
:mod:`sppo.kernels.delta_rule`::

    q, k, v = silu(conv(qkv))        q <- q / |q| / sqrt(K)        k <- k / |k|
    g = -exp(log_rate) softplus(a + bias)        beta = sigmoid(b)

Nothing but a :class:`State` passes from a subsequence to the next. All is computed in fp32 or
better, but q, k, v are rounded to the compute dtype before the rule. Backward computes everything
again, and has autograd differentiate what comes before the rule. Temporary tensors are those of a
tile of tokens.

Legend: C tokens, H value heads, K key size, V value size, M channels of the convolution, R tokens
before a token that its convolution reads, X = R + C. Heads and channels may be those of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sppo.config.model.linear_attention import LinearAttention
from sppo.kernels.delta_rule import RuleInputs, delta_rule, delta_rule_backward
from sppo.kernels.elementwise import accumulation_dtype

RECURRENCE_WEIGHTS = (
    "conv_q.weight",
    "conv_k.weight",
    "conv_v.weight",
    "decay.log_rate",
    "decay.bias",
)
"""Parameters that the recurrence reads."""
TILE_TOKENS = 1024
"""Number of tokens whose temporary tensors are in memory at one time."""
_LEAST_SQUARE = 1e-6
"""Added to the squared lengths by which queries and keys are divided, as in published models."""


class State(NamedTuple):
    """What a layer keeps of the tokens of a document up to one of them, or its gradient."""

    matrix_HKV: Tensor
    """State of the rule, fp32 or better."""
    rows_RM: Tensor
    """Last rows before the convolution, zero before the document; their gradient is in fp32 or
    better."""


def recur(
    weights: Mapping[str, Tensor],
    linear: LinearAttention,
    qkv_CM: Tensor,
    ab_C2H: Tensor,
    state: State | None,
    starts: Sequence[int] = (),
) -> tuple[Tensor, State]:
    """Return the outputs of the rule, ``[C, H, V]``, and the state after the last token.

    Args:
        weights: Weights of the layer, by name within it.
        linear: Sizes of keys, values and the convolution.
        qkv_CM: Projections to queries, keys and values beside each other.
        ab_C2H: Projections to the decays of all value heads, then to the strengths.
        state: State before the first token; None for zeros.
        starts: Ascending indices of the tokens with which documents begin.
    """
    state = _no_state(linear, qkv_CM, ab_C2H) if state is None else state
    outputs = []
    for rows in _tiles(len(qkv_CM)):
        tile = _Tile.of(weights, linear, qkv_CM, ab_C2H, state, starts, rows)
        o_CHV, state = tile.forward()
        outputs.append(o_CHV)
    return torch.cat(outputs), state


def recur_backward(
    do_CHV: Tensor,
    dstate: State | None,
    weights: Mapping[str, Tensor],
    linear: LinearAttention,
    qkv_CM: Tensor,
    ab_C2H: Tensor,
    state: State | None,
    starts: Sequence[int] = (),
) -> tuple[Tensor, Tensor, dict[str, Tensor], State]:
    """Return the gradients of qkv, ab, the weights (fp32 or better) and the state before.

    Args:
        do_CHV: Gradient of the outputs.
        dstate: Gradient of the state after the last token; None for zeros.
        weights: Weights of the layer, as in :func:`recur`.
        linear: Sizes of keys, values and the convolution.
        qkv_CM: Projections to queries, keys and values.
        ab_C2H: Projections to decays and strengths.
        state: State before the first token; None for zeros.
        starts: Ascending indices of the tokens with which documents begin.
    """
    state = _no_state(linear, qkv_CM, ab_C2H) if state is None else state
    runs, tiles = list(_tiles(len(qkv_CM))), []
    for rows in runs:
        tile = _Tile.of(weights, linear, qkv_CM, ab_C2H, state, starts, rows)
        tiles.append(tile)
        state = tile.forward()[1] if rows != runs[-1] else state
    dqkv_CM, dab_C2H = torch.empty_like(qkv_CM), torch.empty_like(ab_C2H)
    dweights: dict[str, Tensor] = {}
    for rows, tile in zip(reversed(runs), reversed(tiles), strict=True):
        dx_XM, dab_C2H[rows], *found, dmatrix_HKV = tile.backward(do_CHV[rows], dstate)
        drows_RM, dqkv_CM[rows] = dx_XM.tensor_split([linear.carried_tokens])
        dstate = State(dmatrix_HKV, drows_RM)
        for name, gradient in zip(RECURRENCE_WEIGHTS, found, strict=True):
            dweights[name] = dweights[name] + gradient if name in dweights else gradient
    assert dstate is not None
    return dqkv_CM, dab_C2H, dweights, dstate


def _tiles(tokens: int) -> Iterator[slice]:
    """Yield the rows of each tile of some tokens."""
    for first in range(0, tokens, TILE_TOKENS):
        yield slice(first, min(first + TILE_TOKENS, tokens))


def _no_state(linear: LinearAttention, qkv_CM: Tensor, ab_C2H: Tensor) -> State:
    """Return the state before the first token of a sequence."""
    shape = ab_C2H.shape[1] // 2, linear.key_size, linear.value_size
    matrix_HKV = qkv_CM.new_zeros(shape, dtype=accumulation_dtype(qkv_CM.dtype))
    return State(matrix_HKV, qkv_CM.new_zeros(linear.carried_tokens, qkv_CM.shape[1]))


@dataclass(frozen=True)
class _Tile:
    """Recurrence of a tile of tokens from the state before it."""

    linear: LinearAttention
    qkv_CM: Tensor
    ab_C2H: Tensor
    weights: tuple[Tensor, ...]
    state: State
    starts: tuple[int, ...]

    @classmethod
    def of(
        cls,
        weights: Mapping[str, Tensor],
        linear: LinearAttention,
        qkv_CM: Tensor,
        ab_C2H: Tensor,
        state: State,
        starts: Sequence[int],
        rows: slice,
    ) -> _Tile:
        """Return the tile of some rows of a subsequence."""
        read = tuple(weights[name] for name in RECURRENCE_WEIGHTS)
        inside = tuple(s - rows.start for s in starts if rows.start <= s < rows.stop)
        return cls(linear, qkv_CM[rows], ab_C2H[rows], read, state, inside)

    @property
    def operands(self) -> list[Tensor]:
        """The carried rows and qkv, ab, and the weights, in the accumulation dtype."""
        x_XM = torch.cat([self.state.rows_RM, self.qkv_CM])
        dtype = accumulation_dtype(x_XM.dtype)
        return [x.detach().to(dtype) for x in (x_XM, self.ab_C2H, *self.weights)]

    def forward(self) -> tuple[Tensor, State]:
        """Return the outputs and the state after the tile."""
        inputs, rows_RM = self._prepare(*self.operands)
        o_CHV, matrix_HKV = delta_rule(inputs, self.state.matrix_HKV, self.starts)
        return o_CHV, State(matrix_HKV, rows_RM.to(self.qkv_CM.dtype))

    def backward(self, do_CHV: Tensor, dstate: State | None) -> tuple[Tensor, ...]:
        """Return the gradients of the operands, and of the matrix before the tile."""
        operands = [x.requires_grad_() for x in self.operands]
        with torch.enable_grad():
            inputs, rows_RM = self._prepare(*operands)
        if dstate is None:
            dstate = State(torch.zeros_like(self.state.matrix_HKV), torch.zeros_like(rows_RM))
        detached = RuleInputs(*(x.detach() for x in inputs))
        dinputs, dmatrix_HKV = delta_rule_backward(
            do_CHV, dstate.matrix_HKV, detached, self.state.matrix_HKV, self.starts
        )
        found = torch.autograd.grad((*inputs, rows_RM), operands, (*dinputs, dstate.rows_RM))
        return *found, dmatrix_HKV

    def _prepare(self, x_XM: Tensor, ab_C2H: Tensor, *weights: Tensor) -> tuple[RuleInputs, Tensor]:
        """Return the operands of the rule, and the rows that are carried on."""
        *conv, log_rate_H, bias_H = weights
        y_CM, rows_RM = _convolve(x_XM, torch.cat(conv), self.starts)
        q, k, v = functional.silu(y_CM).split([len(weight) for weight in conv], -1)
        q_CJK, k_CJK = (_of_length_1(x.unflatten(1, (-1, self.linear.key_size))) for x in (q, k))
        a_CH, b_CH = ab_C2H.chunk(2, -1)
        qkv = (
            q_CJK * self.linear.key_size**-0.5,
            k_CJK,
            v.unflatten(1, (-1, self.linear.value_size)),
        )
        g_CH = -log_rate_H.exp() * functional.softplus(a_CH + bias_H)
        rounded = (x.to(self.qkv_CM.dtype) for x in qkv)
        return RuleInputs(*rounded, g_CH, b_CH.sigmoid()), rows_RM


def _convolve(x_XM: Tensor, weight_MW: Tensor, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the causal convolution within documents, ``[C, M]``, and the rows carried on.

    Args:
        x_XM: R rows that were carried here, and those of the tokens.
        weight_MW: Weights of the R tokens before a token, the earliest first, and of itself.
        starts: Indices of the tokens with which documents begin.
    """
    carried = weight_MW.shape[1] - 1
    tokens = len(x_XM) - carried
    document_X1 = torch.zeros(len(x_XM), 1, dtype=torch.int32, device=x_XM.device)
    for start in starts:
        document_X1[carried + start :] += 1
    y_CM = x_XM[carried:] * weight_MW[:, carried]
    for back in range(1, carried + 1):
        earlier = slice(carried - back, len(x_XM) - back)
        term_CM = x_XM[earlier]
        if starts:
            term_CM = term_CM * (document_X1[earlier] == document_X1[carried:])
        y_CM = torch.addcmul(y_CM, term_CM, weight_MW[:, carried - back])
    rows_RM = x_XM[tokens:] * (document_X1[tokens:] == document_X1[-1])
    return y_CM, rows_RM


def _of_length_1(x: Tensor) -> Tensor:
    """Return vectors divided by their lengths."""
    return x * (x.square().sum(-1, keepdim=True) + _LEAST_SQUARE).rsqrt()
