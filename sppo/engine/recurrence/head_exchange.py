"""Exchange of tokens for heads of linear attention, among ranks that share the tokens of a unit.

It is done before the convolution, whose channels do not depend on each other. Each rank thus keeps
the state of its own heads behind all tokens, and needs no rows of other ranks. With fewer key heads
than ranks, several ranks compute with the same key head, as with the keys of attention.

Legend: c tokens of this rank, C tokens of the unit, H value heads, D size of a value, M channels of
the convolution; h and m those of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sppo.config.model import LinearAttention
from sppo.model.layer import Weights
from sppo.parallel.ulysses import UlyssesAllToAll


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """Exchange of the tokens of one unit.

    Attributes:
        linear: All heads of the layer.
        ranks: All-to-all with value heads as queries, and key heads.
        shard_tokens: Number of tokens on each rank.
    """

    linear: LinearAttention
    ranks: UlyssesAllToAll
    shard_tokens: tuple[int, ...]

    @property
    def own(self) -> LinearAttention:
        """Heads of this rank."""
        return self.linear.of_rank(self.ranks.degree)

    def to_heads(self, qkv_cM: Tensor, ab_c2H: Tensor, *outputs_cHD: Tensor) -> list[Tensor]:
        """Return ``qkv`` ``[C, m]``, ``ab`` ``[C, 2 h]`` and outputs ``[C, h, D]`` of own heads."""
        *keys, v = _by_head(qkv_cM, self.linear)
        queries = [v, *_halves(ab_c2H), *outputs_cHD]
        found = self.ranks.to_heads(queries, keys, shard_tokens=self.shard_tokens)
        v, a, b, *outputs, q, k = found
        return [_beside(q, k, v), _beside(a, b), *outputs]

    def to_tokens(self, dqkv_Cm: Tensor, dab_C2h: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients ``[c, M]`` and ``[c, 2 H]`` of this rank's tokens."""
        *keys, dv = _by_head(dqkv_Cm, self.own)
        queries = [dv, *_halves(dab_C2h)]
        dv, da, db, dq, dk = self.ranks.to_tokens(queries, keys, shard_tokens=self.shard_tokens)
        return _beside(dq, dk, dv), _beside(da, db)

    def outputs_to_tokens(self, o_ChD: Tensor) -> Tensor:
        """Return the outputs ``[c, H, D]`` of this rank's tokens."""
        return self.ranks.to_tokens([o_ChD], shard_tokens=self.shard_tokens)[0]

    def own_rows(self, weights: Weights) -> Weights:
        """Return the rows of this rank's heads, of the weights that the recurrence reads."""
        return {name: weights[name][rows] for name, rows in self._rows.items()}

    def whole(self, name: str, gradient: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of a weight, zero where the weight belongs to heads of other ranks.

        The sum over all ranks, which completes the gradients of every weight, completes it.
        """
        whole = gradient.new_zeros(weight.shape)
        whole[self._rows[name]] = gradient
        return whole

    @property
    def _rows(self) -> dict[str, slice]:
        """Rows of this rank's heads, by the name of the weight."""
        rank, own = self.ranks.rank, self.own
        keys = _part(rank // self.ranks.shard.repeats, of=own.keys_width)
        heads = _part(rank, of=own.value_heads)
        return {
            "conv_q.weight": keys,
            "conv_k.weight": keys,
            "conv_v.weight": _part(rank, of=own.values_width),
            "decay.log_rate": heads,
            "decay.bias": heads,
        }


def _part(index: int, *, of: int) -> slice:
    """Return the rows of the part ``index`` if every part has ``of`` rows."""
    return slice(index * of, (index + 1) * of)


def _by_head(qkv_CM: Tensor, linear: LinearAttention) -> list[Tensor]:
    """Return q, k and v ``[C, heads, size]``, which lie beside each other."""
    keys, values = (linear.key_heads, linear.key_size), (linear.value_heads, linear.value_size)
    widths = [linear.keys_width, linear.keys_width, linear.values_width]
    parts = torch.split(qkv_CM, widths, dim=1)
    return [x.view(len(x), *of) for x, of in zip(parts, (keys, keys, values), strict=True)]


def _halves(ab_C2H: Tensor) -> tuple[Tensor, ...]:
    """Return a and b ``[C, H, 1]``, which lie beside each other."""
    return ab_C2H.unsqueeze(2).chunk(2, dim=1)


def _beside(*parts: Tensor) -> Tensor:
    """Return tensors ``[C, heads, size]`` beside each other, ``[C, widths]``."""
    return torch.cat([part.flatten(1) for part in parts], dim=1)
