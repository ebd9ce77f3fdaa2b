"""Experts of a model: MLPs of which a router chooses some for every token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from sppo.config.base import MOST_LAYERS, MOST_WIDTH, Section, Width

MOST_EXPERTS = 1 << 14
"""Most experts of a layer: their numbers are stored in 16 bits."""


class Experts(Section):
    """Mixture of experts in place of the MLP: each token passes through the experts of its choice.

    No expert has a capacity, so no token is dropped.
    """

    count: Annotated[int, Field(ge=1, le=MOST_EXPERTS)]
    """X: number of experts of a layer."""
    per_token: Annotated[int, Field(ge=1, le=MOST_EXPERTS)]
    """k: number of experts that each token passes through."""
    mlp_size: Width
    """Width of the MLP of one expert."""
    shared_mlp_size: int = Field(default=0, ge=0, le=MOST_WIDTH)
    """Width of the MLP that every token passes through beside its experts; 0 for none."""
    shared_switch: bool = False
    """Whether the output of the shared MLP is multiplied by the sigmoid of a projection of the
    token (Qwen2-MoE)."""
    bias: bool = False
    """Biases of the experts' projections."""
    router_bias: bool = False
    """Bias of the router's projection."""
    score: Literal["softmax", "softmax_chosen", "sigmoid"] = "softmax"
    """Weights of the chosen experts. softmax: softmax over the logits of all experts;
    softmax_chosen: over the logits of the chosen ones (gpt-oss); sigmoid: of each logit."""
    normalize: bool = False
    """Whether the weights of a token's experts are divided by their sum."""
    scale: float = Field(default=1.0, gt=0)
    """Factor of the weights of the chosen experts."""
    groups: Annotated[int, Field(ge=1, le=MOST_EXPERTS)] = 1
    """Number of groups of consecutive experts; a token chooses groups first, then experts in
    them."""
    groups_per_token: Annotated[int, Field(ge=1, le=MOST_EXPERTS)] = 1
    """Number of groups that a token chooses, by the sum of the two best scores of each."""
    choice_bias: bool = False
    """Whether experts are chosen by their score plus a bias that no gradient reaches, and which
    balances their load; the weights are the scores without it (GLM-4.5, DeepSeek-V3)."""
    dense_layers: int = Field(default=0, ge=0, le=MOST_LAYERS)
    """Number of first layers that have an MLP of ``model.mlp_size`` in place of experts."""

    def _broken_rules(self) -> Iterator[str]:
        if self.per_token > self.count:
            yield f"per_token {self.per_token} is above count {self.count}; lower it"
        if self.count % self.groups:
            yield f"count {self.count} is not a multiple of groups {self.groups}; change groups"
        elif self.groups_per_token > self.groups:
            yield (
                f"groups_per_token {self.groups_per_token} is above groups {self.groups}; lower it"
            )
        elif self.per_token > self.groups_per_token * (self.count // self.groups):
            yield (
                f"per_token {self.per_token} is more than the experts of {self.groups_per_token} "
                f"groups of {self.count // self.groups}; raise groups_per_token"
            )
        if self.groups > 1 and self.count // self.groups < 2:
            yield f"groups {self.groups} leave one expert in each, of at least 2; lower it"
        if self.score == "softmax_chosen" and (self.normalize or self.choice_bias):
            yield "score softmax_chosen has sum 1 already; leave out normalize and choice_bias"
        if self.shared_switch and not self.shared_mlp_size:
            yield "shared_switch needs a shared MLP: set shared_mlp_size"
