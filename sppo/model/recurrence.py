"""Convolution and gated delta rule of a layer with linear attention, from a state to a state.

Queries, keys and values pass a causal convolution of each channel, then the rule, which is
:mod:`sppo.kernels.delta_rule`::

    q, k, v = silu(conv(qkv))        q <- q / |q| / sqrt(K)        k <- k / |k|
    g = -exp(log_rate) softplus(a + bias)        beta = sigmoid(b)

Nothing but a :class:`State` passes from a subsequence to the next. All is computed in fp32 or
better, but q, k, v are rounded to the compute dtype before the rule. Backward computes everything
again for autograd. Temporary tensors are those of a tile of tokens.

Legend: C tokens, H value heads, K key size, V value size, M channels of the convolution, R tokens
before a token that its convolution reads, X = R + C, I = M + 2 H inputs. Heads and channels may be
those of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sppo.config.model.linear_attention import LinearAttention
from sppo.cost.tiles import RECURRENCE_TOKENS
from sppo.kernels.chunked_rule import RuleOperands, document_begins
from sppo.kernels.delta_rule import delta_rule, state_after
from sppo.kernels.elementwise import accumulation_dtype

RECURRENCE_WEIGHTS = (
    "conv_q.weight",
    "conv_k.weight",
    "conv_v.weight",
    "decay.log_rate",
    "decay.bias",
)
"""Parameters that the recurrence reads."""
_LEAST_SQUARE = 1e-6
"""Added to the squared lengths by which queries and keys are divided, as in published models."""


class State(NamedTuple):
    """What a layer keeps of the tokens of a document up to one of them, or its gradient."""

    matrix_HKV: Tensor
    """State of the rule, fp32 or better."""
    rows_RM: Tensor
    """Last rows before the convolution, in the compute dtype, zero before the document."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Recurrence of one subsequence in one layer.

    Attributes:
        weights: Weights of the layer, by name within it.
        linear: Sizes of keys, values and the convolution.
        inputs_CI: Projections to queries, keys and values, then to the decays of all value heads,
            then to the shares, beside each other.
        starts: Ascending indices of the tokens with which documents begin.
    """

    weights: Mapping[str, Tensor]
    linear: LinearAttention
    inputs_CI: Tensor
    starts: Sequence[int] = ()

    def forward(self, state: State | None) -> tuple[Tensor, State]:
        """Return the outputs ``[C, H, V]`` and the state behind, from that before, or zeros."""
        wide = self._wide(state)
        of_token = self.linear.value_heads, self.linear.value_size
        o_CHV = self.inputs_CI.new_empty(len(self.inputs_CI), *of_token)
        for tile in self._tiles:
            o_CHV[tile], wide = self._tile_forward(tile, self._operands(tile, wide))
        return o_CHV, self._narrow(wide)

    def backward(
        self, do_CHV: Tensor, dstate: State | None, state: State | None
    ) -> tuple[Tensor, dict[str, Tensor], State]:
        """Return the gradients of the inputs, the weights (fp32 or better) and the state before.

        Args:
            do_CHV: Gradient of the outputs.
            dstate: Gradient of the state behind; None for zeros.
            state: State before, as in :meth:`forward`.
        """
        states, dwide = [self._wide(state)], self._wide(dstate)
        for tile in self._tiles[:-1]:
            states.append(self._tile_state(tile, self._operands(tile, states[-1])))
        dinputs_CI = torch.empty_like(self.inputs_CI)
        dweights: dict[str, Tensor] = {}
        for tile in reversed(self._tiles):
            dwide, dinputs_CI[tile], *of_weights = self._tile_backward(
                tile, self._operands(tile, states.pop()), do_CHV[tile], dwide
            )
            for name, gradient in zip(RECURRENCE_WEIGHTS, of_weights, strict=True):
                dweights[name] = dweights[name] + gradient if name in dweights else gradient
        return dinputs_CI, dweights, self._narrow(dwide)

    def _tile_forward(self, tile: slice, operands: Sequence[Tensor]) -> tuple[Tensor, State]:
        """Return the outputs of a tile, and the state behind it."""
        rule, rows_RM = self._rule(tile, operands)
        o_CHV, matrix_HKV = delta_rule(rule)
        return o_CHV, State(matrix_HKV, rows_RM)

    def _tile_state(self, tile: slice, operands: Sequence[Tensor]) -> State:
        """Return the state behind a tile."""
        rule, rows_RM = self._rule(tile, operands)
        return State(state_after(rule), rows_RM)

    def _tile_backward(
        self, tile: slice, operands: Sequence[Tensor], do_CHV: Tensor, dstate: State
    ) -> tuple[Any, ...]:
        """Return the gradients of the state before a tile, of its inputs, and of weights."""
        leaves = [x.requires_grad_() for x in operands]
        with torch.enable_grad():
            o_CHV, state = self._tile_forward(tile, leaves)
        found = torch.autograd.grad((o_CHV, *state), leaves, (do_CHV, *dstate))
        dmatrix_HKV, drows_RM, *others = found
        return State(dmatrix_HKV, drows_RM.clone()), *others

    def _rule(self, tile: slice, operands: Sequence[Tensor]) -> tuple[RuleOperands, Tensor]:
        """Return the operands of the rule for a tile, and the rows that are carried on."""
        starts = [s - tile.start for s in self.starts if tile.start <= s < tile.stop]
        matrix_HKV, rows_RM, inputs_CI, *conv, log_rate_H, bias_H = operands
        heads = self.linear.value_heads
        qkv_CM, a_CH, b_CH = torch.split(inputs_CI, [self.linear.conv_width, heads, heads], 1)
        y_CM, rows_RM = _convolve(torch.cat([rows_RM, qkv_CM]), torch.cat(conv), starts)
        q, k, v = torch.split(functional.silu(y_CM), [len(weight) for weight in conv], 1)
        q_CJK, k_CJK = (_of_length_1(x.view(len(x), -1, self.linear.key_size)) for x in (q, k))
        v_CHV = v.view(len(v), -1, self.linear.value_size)
        g_CH = -log_rate_H.exp() * functional.softplus(a_CH + bias_H)
        scaled = q_CJK * self.linear.key_size**-0.5, k_CJK, v_CHV
        q, k, v = (x.to(self.inputs_CI.dtype) for x in scaled)
        return RuleOperands(q, k, v, g_CH, b_CH.sigmoid(), matrix_HKV, starts), rows_RM

    def _operands(self, tile: slice, state: State) -> list[Tensor]:
        """Return what a tile is computed from, in the accumulation dtype, to differentiate by."""
        weights = (self.weights[name] for name in RECURRENCE_WEIGHTS)
        operands = *state, self.inputs_CI[tile], *weights
        return [x.detach().to(accumulation_dtype(self.inputs_CI.dtype)) for x in operands]

    def _wide(self, state: State | None) -> State:
        """Return a state, or zeros, in the accumulation dtype."""
        dtype = accumulation_dtype(self.inputs_CI.dtype)
        if state is not None:
            return State(*(x.to(dtype) for x in state))
        linear = self.linear
        matrix = linear.value_heads, linear.key_size, linear.value_size
        shapes = matrix, (linear.carried_tokens, linear.conv_width)
        return State(*(self.inputs_CI.new_zeros(shape, dtype=dtype) for shape in shapes))

    def _narrow(self, state: State) -> State:
        """Return a state as it is kept."""
        return State(state.matrix_HKV, state.rows_RM.to(self.inputs_CI.dtype))

    @property
    def _tiles(self) -> list[slice]:
        """Rows of each tile."""
        firsts = range(0, len(self.inputs_CI), RECURRENCE_TOKENS)
        return [slice(first, first + RECURRENCE_TOKENS) for first in firsts]


def _convolve(x_XM: Tensor, weight_MW: Tensor, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the causal convolution within documents, ``[C, M]``, and the rows carried on.

    Args:
        x_XM: R rows that were carried here, and those of the tokens.
        weight_MW: Weights of the R tokens before a token, the earliest first, and of itself.
        starts: Indices of the tokens with which documents begin.
    """
    carried = weight_MW.shape[1] - 1
    begins_X = document_begins([carried + s for s in starts], len(x_XM), x_XM.device)
    document_X1 = begins_X.cumsum(0).unsqueeze(1)
    y_CM = x_XM[carried:] * weight_MW[:, carried]
    for back in range(1, carried + 1):
        earlier = slice(carried - back, len(x_XM) - back)
        term_CM = x_XM[earlier]
        if starts:
            term_CM = term_CM * (document_X1[earlier] == document_X1[carried:])
        y_CM = torch.addcmul(y_CM, term_CM, weight_MW[:, carried - back])
    last = slice(len(x_XM) - carried, None)
    return y_CM, x_XM[last] * (document_X1[last] == document_X1[-1])


def _of_length_1(x: Tensor) -> Tensor:
    """Return vectors divided by their lengths."""
    return x * (x.square().sum(-1, keepdim=True) + _LEAST_SQUARE).rsqrt()
