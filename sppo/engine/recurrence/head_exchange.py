"""Exchange of tokens for heads of linear attention, among ranks that share the tokens of a unit.

It is done before the convolution, whose channels do not depend on each other. Each rank thus keeps
the state of its own heads behind all tokens, and needs no rows of other ranks. The heads of a rank
are an equal part of all: of queries, keys and values, and of the rows of the weights that the
recurrence reads.

Legend: c tokens of this rank, C tokens of the unit, H value heads, D size of a value, I width of
the inputs of the recurrence; h and i those of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sppo.config.model import LinearAttention
from sppo.model.layer import Weights
from sppo.model.recurrence import RECURRENCE_WEIGHTS
from sppo.parallel.ulysses import UlyssesAllToAll


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """Exchange of the tokens of one unit.

    Attributes:
        linear: All heads of the layer.
        ranks: All-to-all among the ranks; None if this rank has all tokens, and keeps all heads.
        shard_tokens: Number of tokens on each rank.
    """

    linear: LinearAttention
    ranks: UlyssesAllToAll | None
    shard_tokens: tuple[int, ...]

    @property
    def own(self) -> LinearAttention:
        """Heads of this rank."""
        assert self.linear.key_heads % self._degree == 0, "every rank has whole key heads"
        return self.linear.of_rank(self._degree)

    def to_heads(self, inputs_cI: Tensor, *do_cHD: Tensor) -> list[Tensor]:
        """Return the inputs ``[C, i]`` and, if given, ``do`` ``[C, h, D]``."""
        if self.ranks is None:
            return [inputs_cI, *do_cHD]
        beside = torch.cat([inputs_cI, *(x.flatten(1) for x in do_cHD)], 1)
        parts = torch.split(beside, [*_widths(self.linear), *(x[0].numel() for x in do_cHD)], 1)
        by_rank = torch.cat([x.view(len(x), self.ranks.degree, -1) for x in parts], 2)
        (own,) = self.ranks.to_heads([by_rank], shard_tokens=self.shard_tokens)
        inputs, *do = own.squeeze(1).tensor_split([self.own.inputs_width][: len(do_cHD)], 1)
        return [inputs, *(x.reshape(len(x), -1, self.linear.value_size) for x in do)]

    def to_tokens(self, dinputs_Ci: Tensor) -> Tensor:
        """Return the gradient ``[c, I]`` of the inputs of this rank's tokens."""
        if self.ranks is None:
            return dinputs_Ci
        own = dinputs_Ci.unsqueeze(1)
        (by_rank,) = self.ranks.to_tokens([own], shard_tokens=self.shard_tokens)
        parts = torch.split(by_rank, _widths(self.own), 2)
        return torch.cat([x.flatten(1) for x in parts], 1)

    def outputs_to_tokens(self, o_ChD: Tensor) -> Tensor:
        """Return the outputs ``[c, H, D]`` of this rank's tokens."""
        if self.ranks is None:
            return o_ChD
        return self.ranks.to_tokens([o_ChD], shard_tokens=self.shard_tokens)[0]

    def own_weights(self, weights: Weights) -> Weights:
        """Return the rows of this rank's heads, of the weights that the recurrence reads."""
        return {name: self._own_rows(weights[name]) for name in RECURRENCE_WEIGHTS}

    def whole(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of a weight, zero in the rows of other ranks.

        The sum over all ranks, which completes the gradients of every weight, completes it.
        """
        whole = gradient.new_zeros(weight.shape)
        self._own_rows(whole).copy_(gradient)
        return whole

    def _own_rows(self, weight: Tensor) -> Tensor:
        """Return the rows of this rank's heads, a view."""
        return weight.chunk(self._degree)[0 if self.ranks is None else self.ranks.rank]

    @property
    def _degree(self) -> int:
        return 1 if self.ranks is None else self.ranks.degree


def _widths(linear: LinearAttention) -> list[int]:
    """Return the widths of queries, keys, values, decays and strengths, beside each other."""
    keys, values, heads = linear.keys_width, linear.values_width, linear.value_heads
    return [keys, keys, values, heads, heads]
