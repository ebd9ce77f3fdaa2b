"""Linear attention of a unit whose tokens several ranks share, each with some of the heads.

Ranks exchange tokens for heads before the convolution, whose channels do not depend on each other.
Each rank thus keeps the state of its own heads, behind all tokens, and no rows of other ranks. The
gate and the norm of the output stay with the tokens. With fewer key heads than ranks, several ranks
compute with the same key head, as with the keys of attention.

Gradients of convolutions and decays are those of the rank's own heads, and zero elsewhere: the sum
over all ranks, which completes the gradients of every weight, completes them too.

Legend: c tokens of this rank, C tokens of the unit, H value heads, D size of a value, M channels of
the convolution, h and m those of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sppo.config.model import LinearAttention
from sppo.engine.recurrence.stored_recurrence import StoredRecurrence
from sppo.model.gradients import GradientSink
from sppo.model.layer import Weights
from sppo.parallel.ulysses import UlyssesAllToAll


@dataclass(frozen=True, slots=True)
class UlyssesRecurrence:
    """:class:`sppo.model.linear_mixer.SubsequenceRecurrence` of this rank's tokens of a unit.

    Attributes:
        linear: All heads of the layer.
        own: Recurrence of this rank's heads over all tokens.
        heads: All-to-all of value heads, as queries, and of key heads.
        shard_tokens: Number of tokens on each rank.
    """

    linear: LinearAttention
    own: StoredRecurrence
    heads: UlyssesAllToAll
    shard_tokens: tuple[int, ...]

    def forward(self, qkv_cM: Tensor, ab_c2H: Tensor, weights: Weights) -> Tensor:
        """Return the output ``[c, H, D]``; keep the state behind the unit."""
        qkv, ab = self._to_heads(qkv_cM, ab_c2H)
        return self._to_tokens(self.own.forward(qkv, ab, self._own_rows(weights)))

    def recompute(self, qkv_cM: Tensor, ab_c2H: Tensor, weights: Weights) -> Tensor:
        """Return the output ``[c, H, D]`` again, of a unit that has not run backward."""
        qkv, ab = self._to_heads(qkv_cM, ab_c2H)
        return self._to_tokens(self.own.recompute(qkv, ab, self._own_rows(weights)))

    def backward(
        self,
        do_cHD: Tensor,
        qkv_cM: Tensor,
        ab_c2H: Tensor,
        weights: Weights,
        gradients: GradientSink,
    ) -> tuple[Tensor, Tensor]:
        """Return (dqkv_cM, dab_c2H) in new memory; hand on the gradient of the state."""
        qkv, ab, do = self._to_heads(qkv_cM, ab_c2H, do_cHD)
        dqkv, dab, dweights = self.own.gradients(do, qkv, ab, self._own_rows(weights))
        for name, gradient in dweights.items():
            if gradients.trains(name):
                whole = gradient.new_zeros(weights[name].shape)
                whole[self._rows[name]] = gradient
                gradients.add(name, whole)
        *keys, dv = _by_head(dqkv, self.own.linear)
        found = self.heads.to_tokens([dv, *_halves(dab)], keys, shard_tokens=self.shard_tokens)
        dv, da, db, dq, dk = found
        return _beside(dq, dk, dv), _beside(da, db)

    def _to_heads(self, qkv_cM: Tensor, ab_c2H: Tensor, *outputs_cHD: Tensor) -> list[Tensor]:
        """Return ``qkv`` ``[C, m]``, ``ab`` ``[C, 2 h]`` and outputs ``[C, h, D]`` of own heads."""
        *keys, v = _by_head(qkv_cM, self.linear)
        queries = [v, *_halves(ab_c2H), *outputs_cHD]
        found = self.heads.to_heads(queries, keys, shard_tokens=self.shard_tokens)
        v, a, b, *outputs, q, k = found
        return [_beside(q, k, v), _beside(a, b), *outputs]

    def _to_tokens(self, o_ChD: Tensor) -> Tensor:
        """Return the outputs of this rank's tokens."""
        return self.heads.to_tokens([o_ChD], shard_tokens=self.shard_tokens)[0]

    def _own_rows(self, weights: Weights) -> Weights:
        """Return the rows of the weights that belong to this rank's heads."""
        return {name: weights[name][rows] for name, rows in self._rows.items()}

    @property
    def _rows(self) -> dict[str, slice]:
        """Rows of this rank's heads, by the name of the weight."""
        rank, shard, own = self.heads.rank, self.heads.shard, self.own.linear
        keys = _part(rank // shard.repeats, of=own.keys_width)
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
