"""Section ``routing`` of a run file: how the router of a mixture of experts is trained."""

from __future__ import annotations

from pydantic import Field

from sppo.config.base import Section


class RoutingConfig(Section):
    """Training of the routers of ``model.experts``: losses and biases that balance the load."""

    balance_loss: float = Field(default=0.0, ge=0)
    """Factor of the balance loss of each layer and sequence (Fedus et al., 2021): X times the sum
    over experts of the share of the tokens that chose the expert, not divided by k, times its mean
    softmax, or for sigmoid scores its mean share of a token's scores. Documents packed into one
    sequence are balanced together. 0, as when a model is fine-tuned, adds none."""
    z_loss: float = Field(default=0.0, ge=0)
    """Factor of the mean square of the log-sum-exp of the router's logits (Zoph et al., 2022)."""
    bias_update: float = Field(default=0.0, ge=0)
    """Amount by which ``choice_bias`` of an expert rises after each step in which fewer tokens than
    the mean chose it, and falls otherwise (Wang et al., 2024)."""


NO_ROUTING_LOSSES = RoutingConfig()
