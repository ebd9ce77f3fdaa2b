"""Loads of experts in a step, and the terms of the routers that depend on them.

The load of an expert is the number of tokens that chose it. Loads are counted once, in forward:
recomputation reads the choice and counts nothing. All forwards of a sequence precede its first
backward, so that a balance loss has the loads of the whole sequence whatever its cut; those of all
ranks over which its tokens are sharded are added up before. A sequence is what the engine runs as
one: documents and samples that are packed into it, and their padding, are balanced together.

Sequences weigh by their tokens in the step: a loss of a sequence of S tokens is multiplied by S
over the tokens of all sequences of all replicas.

Legend: L layers, X experts, C tokens, k experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sppo.config.model import ModelConfig
from sppo.config.routing import NO_ROUTING_LOSSES, RoutingConfig
from sppo.cost.parameters import choice_bias
from sppo.engine.unit import Unit
from sppo.kernels.elementwise import accumulation_dtype
from sppo.model.router import NO_TERMS, RoutingTerms
from sppo.parallel.ulysses import UlyssesAllToAll


@dataclass
class ExpertLoads:
    """Loads of the experts of all layers on one rank, and the terms of their routers.

    Attributes:
        model: Shape of the model.
        dtype: Compute dtype.
        routing: Losses of the routers.
        choice_biases: Biases of the choice by global name, ``[X]`` in fp32.
        exchange: Communication with the ranks over which tokens are sharded; None if this rank has
            all tokens.
    """

    model: ModelConfig
    dtype: torch.dtype
    routing: RoutingConfig = NO_ROUTING_LOSSES
    choice_biases: Mapping[str, Tensor] = field(default_factory=dict)
    exchange: UlyssesAllToAll | None = None

    def __post_init__(self) -> None:
        self._own: dict[int, Tensor] = {}
        self._of_sequence: dict[tuple[int, int], Tensor] = {}
        self._token_weight = 0.0

    def begin(self, *, num_tokens: int) -> None:
        """Begin a step of ``num_tokens`` tokens of all replicas; 0 adds no losses."""
        self._own.clear()
        self._token_weight = 1.0 / num_tokens if num_tokens else 0.0

    def add(self, unit: Unit, layer: int, chosen_Ck: Tensor) -> None:
        """Count the experts that the tokens of a unit chose in a layer; once, in forward."""
        assert self.model.experts is not None, "only experts are chosen"
        index = chosen_Ck.flatten().long()
        nothing_X = index.new_zeros(self.model.experts.count)
        loads_X = nothing_X.index_add(0, index, torch.ones_like(index))
        self._own[layer] = self._own.get(layer, nothing_X) + loads_X
        if self.routing.balance_loss:
            key = unit.sequence, layer
            self._of_sequence[key] = self._of_sequence.get(key, nothing_X) + loads_X

    def complete(self, unit: Unit, layers: Sequence[int]) -> None:
        """Add up the loads of a sequence over all ranks. Collective, before its first backward."""
        keys = [key for layer in layers if (key := (unit.sequence, layer)) in self._of_sequence]
        if self.exchange is not None and keys:
            loads_LX = torch.stack([self._of_sequence[key] for key in keys])
            self.exchange.add_up_(loads_LX)
            self._of_sequence.update(zip(keys, loads_LX, strict=True))

    def release(self, unit: Unit, layers: Sequence[int]) -> None:
        """Forget the loads of a sequence, after its last backward."""
        for layer in layers:
            self._of_sequence.pop((unit.sequence, layer), None)

    def terms(self, unit: Unit, layer: int) -> RoutingTerms:
        """Return the terms of the router of a layer; those of the losses are for backward."""
        if not self.model.layer_type(layer).routed:
            return NO_TERMS
        loads_X, balance_X = self._of_sequence.get((unit.sequence, layer)), None
        if loads_X is not None:
            factor = self.routing.balance_loss * len(loads_X) * self._token_weight
            dtype = accumulation_dtype(self.dtype)
            balance_X = loads_X.to(dtype).mul_(factor / unit.span.length)
        bias_X = self.choice_biases.get(choice_bias(layer))
        return RoutingTerms(bias_X, balance_X, self.routing.z_loss * self._token_weight)

    def take(self) -> dict[int, Tensor]:
        """Return the loads ``[X]`` of this rank's tokens in the step by layer, and forget them."""
        loads, self._own = self._own, {}
        return loads

    @property
    def num_sequences(self) -> int:
        """Number of sequences whose loads are held."""
        return len({sequence for sequence, _ in self._of_sequence})
