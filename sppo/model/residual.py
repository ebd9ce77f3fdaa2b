"""Residual stream of a layer: what attention and the MLP read of it and what they add to it.

With the residual scale s, and each norm only where the model places one:

    x_mid = x_in  + s attention_post_norm(attention(attention_norm(x_in)))
    y     = x_mid + s mlp_post_norm(MLP(mlp_norm(x_mid)))

Legend: C tokens, c of them on this rank, E hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from sppo.config.model import ModelConfig
from sppo.model.gradients import GradientSink
from sppo.model.norms import add_norm_, norm, norm_backward


@dataclass(frozen=True, slots=True)
class TokenExchange:
    """Exchange of the residual stream's tokens before and after projections.

    By default it exchanges nothing: the rank has all tokens, and whole weights. With sharded
    weights (Megatron), both are collectives of the ranks over which tokens are sharded.
    """

    gather: Callable[[Tensor], Tensor] = lambda x_cE: x_cE
    """Function that returns ``[C, E]``: the tokens of all ranks."""
    scatter_sum: Callable[[Tensor], Tensor] = lambda x_CE: x_CE
    """Function that returns ``[c, E]``: this rank's tokens of the sum over all ranks."""


@dataclass(frozen=True, slots=True)
class Residual:
    """Norms, scale and token exchange between the residual stream and the projections of a layer.

    Attributes:
        model: Shape of the model.
        weights: Weights of the layer, by name within it.
        tokens: Collectives of the ranks over which the stream's tokens are sharded.
    """

    model: ModelConfig
    weights: Mapping[str, Tensor]
    tokens: TokenExchange

    def middle(self, x_CE: Tensor, out_CE: Tensor) -> tuple[Tensor, Tensor]:
        """Return (x_mid, input of the MLP with all tokens) for the output of attention."""
        x_mid = self.term("attention_post_norm", out_CE)
        if not self.model.norms_inputs:
            return x_mid.add_(x_CE), self.tokens.gather(x_mid)
        n2 = add_norm_(self.model, "mlp_norm", x_mid, x_CE, self.weights)
        return x_mid, self.tokens.gather(n2)

    def add_attention(self, x_CE: Tensor, out_CE: Tensor) -> Tensor:
        """Return ``x_mid`` alone, bitwise equal to that of :meth:`middle`."""
        return self.term("attention_post_norm", out_CE).add_(x_CE)

    def normed_input(self, name: str, x_CE: Tensor) -> Tensor:
        """Return the input of projections, ``[C, E]``: the stream or its norm, all tokens."""
        if self.model.norms_inputs:
            x_CE = norm(self.model, name, x_CE, self.weights)
        return self.tokens.gather(x_CE)

    def normed_input_backward(
        self,
        name: str,
        dn_CE: Tensor,
        x_CE: Tensor,
        dresidual_CE: Tensor,
        gradients: GradientSink,
    ) -> Tensor:
        """Return the gradient of :meth:`normed_input`'s stream, with that of the residual.

        ``dn_CE``, the gradient through the projections, is overwritten.
        """
        dn_CE = self.tokens.scatter_sum(dn_CE)
        if not self.model.norms_inputs:
            return dn_CE.add_(dresidual_CE)
        return norm_backward(
            self.model, name, dn_CE, x_CE, self.weights, gradients, dresidual_CE=dresidual_CE
        )

    def term(self, name: str, out_CE: Tensor) -> Tensor:
        """Return what an output adds to the stream; overwrites the output if it has no norm."""
        if self.model.norms_outputs:
            out_CE = norm(self.model, name, out_CE, self.weights)
        scale = self.model.residual_scale
        return out_CE if scale == 1 else out_CE.mul_(scale)

    def term_backward(
        self, name: str, dterm_CE: Tensor, out_CE: Tensor | None, gradients: GradientSink
    ) -> Tensor:
        """Return the gradient of :meth:`term`'s output, which a norm needs."""
        scale = self.model.residual_scale
        dterm_CE = dterm_CE if scale == 1 else dterm_CE * scale
        if not self.model.norms_outputs:
            return dterm_CE
        assert out_CE is not None, "a norm needs its input"
        return norm_backward(self.model, name, dterm_CE, out_CE, self.weights, gradients)
