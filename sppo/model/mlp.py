"""MLP of a layer behind one interface, without its norms and the residual connection.

Legend: C tokens, E hidden, F MLP width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from sppo.config.model import ModelConfig
from sppo.kernels import elementwise
from sppo.model.gradients import GradientSink
from sppo.model.projection import Projection

NOTHING: Mapping[str, Tensor] = MappingProxyType({})


class Mlp(Protocol):
    """MLP of one layer for the tokens of a subsequence.

    Its output is made in two steps, between which tensors may be saved: :meth:`inputs`, from the
    tokens, and :meth:`output`, from the inputs alone. With sharded weights (Megatron) tokens are
    gathered, and outputs and gradients of tokens are terms of a sum over the ranks.
    """

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors of :meth:`inputs`, those that a plan may save and others."""
        ...

    def inputs(self, n2_CE: Tensor, known: Mapping[str, Tensor] = NOTHING) -> dict[str, Tensor]:
        """Return the tensors from which the output is computed, by name.

        Args:
            n2_CE: Tokens: all of a subsequence, or its last ones.
            known: Some of the tensors, of these tokens; they are returned and not computed again.
        """
        ...

    def output(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the output ``[C, E]``; ``inputs`` has all :attr:`names`, and is not changed."""
        ...

    def backward(
        self,
        dy_CE: Tensor,
        n2_CE: Tensor,
        inputs: dict[str, Tensor],
        gradients: GradientSink,
    ) -> Tensor:
        """Return the gradient of ``n2_CE``, in new memory.

        Args:
            dy_CE: Gradient of the output.
            n2_CE: Tokens.
            inputs: Some or all of :meth:`inputs`; the others are recomputed from ``n2_CE``. The
                dictionary is emptied, and its tensors are overwritten.
            gradients: Sink of the gradients of the weights, which owns all operands.
        """
        ...


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """:class:`Mlp` of which every token passes through all of the width.

    Attributes:
        model: Shape of the model; the MLP width follows the weights.
        weights: Weights of the layer, by name within it.
        adapter_scale: Factor of the product of the factors of an adapter.
        prefix: Begin of the names of the projections and of their outputs.
    """

    model: ModelConfig
    weights: Mapping[str, Tensor]
    adapter_scale: float
    prefix: str = ""

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors that the activation reads."""
        return frozenset(map(self._name, self.model.mlp_inputs))

    def inputs(self, n2_CE: Tensor, known: Mapping[str, Tensor] = NOTHING) -> dict[str, Tensor]:
        """Return the projections of the tokens that the activation reads, ``[C, F]``, by name."""
        found = dict(known)
        for name in sorted(self.names - known.keys(), reverse=True):
            found[name] = self._projection(name).forward(n2_CE)
        return found

    def output(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the down projection of the activation, ``[C, E]``."""
        gate, up = inputs.get(self._name("gate")), inputs[self._name("up")]
        hidden = elementwise.activation(gate, up, kind=self.model.mlp)
        return self._projection(self._name("down")).forward(hidden)

    def backward(
        self,
        dy_CE: Tensor,
        n2_CE: Tensor,
        inputs: dict[str, Tensor],
        gradients: GradientSink,
    ) -> Tensor:
        """Return the gradient of ``n2_CE``; see :meth:`Mlp.backward`."""
        inputs.update(self.inputs(n2_CE, inputs))
        up, gate = inputs.pop(self._name("up")), inputs.pop(self._name("gate"), None)
        back = self._projection(self._name("down")).backward(dy_CE)
        del dy_CE  # otherwise it stays alive beside the gradients of the inputs
        dhidden = back.input_gradient()
        inner = elementwise.activation_backward_(dhidden, gate, up, kind=self.model.mlp)
        del dhidden, gate, up
        back.parameter_gradients(inner.hidden_CF, gradients)
        back = self._projection(self._name("up")).backward(inner.dup_CF)
        back.parameter_gradients(n2_CE, gradients)
        dn2 = back.input_gradient()
        if inner.dgate_CF is not None:
            back = self._projection(self._name("gate")).backward(inner.dgate_CF)
            back.parameter_gradients(n2_CE, gradients)
            back.input_gradient(add_to_CI=dn2)
        return dn2

    def _name(self, projection: str) -> str:
        return self.prefix + projection

    def _projection(self, name: str) -> Projection:
        return Projection(name, self.weights, self.adapter_scale)
