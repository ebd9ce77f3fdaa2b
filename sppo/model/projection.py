"""Projections of a layer with the low-rank adapters that they may have, forward and backward.

With an adapter of scale s a projection computes ``y = x W' + b + s (x A') B'``. Nothing is saved
for backward: ``u = s x A'``, which is small, is computed again. Each parameter may be frozen.

Legend: C tokens, O outputs, I inputs, r rank of the adapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from sppo.cost.trainable import LORA_A, LORA_B
from sppo.kernels.linear import add_product_, input_gradient, linear
from sppo.model.gradients import GradientSink


@dataclass(frozen=True, slots=True)
class Projection:
    """A projection of a layer.

    Attributes:
        name: Name of the projection, such as "q".
        weights: Weights of the layer, by name within it.
        scale: Factor s of the adapter.
    """

    name: str
    weights: Mapping[str, Tensor]
    scale: float

    def forward(self, x_CI: Tensor) -> Tensor:
        """Return the projection of ``x_CI``, ``[C, O]``."""
        y_CO = linear(x_CI, self.weight_OI, self.weights.get(f"{self.name}.bias"))
        if self.has_adapter:
            add_product_(y_CO, self.inner(x_CI), self.factor(LORA_B).t())
        return y_CO

    def backward(self, dy_CO: Tensor) -> ProjectionBackward:
        """Return the backward of the projection, given the gradient of its result."""
        du_Cr = None
        if self.has_adapter:
            du_Cr = input_gradient(dy_CO, self.factor(LORA_B)).mul_(self.scale)
        return ProjectionBackward(self, dy_CO, du_Cr)

    def inner(self, x_CI: Tensor) -> Tensor:
        """Return ``u = s x A'``, ``[C, r]``."""
        return linear(x_CI, self.factor(LORA_A)).mul_(self.scale)

    @property
    def weight_OI(self) -> Tensor:
        """The weight W."""
        return self.weights[f"{self.name}.weight"]

    @property
    def has_adapter(self) -> bool:
        """True if the projection has the factors of an adapter."""
        return f"{self.name}.{LORA_A}" in self.weights

    def factor(self, factor: str) -> Tensor:
        """Return a factor of the adapter, ``LORA_A`` or ``LORA_B``."""
        return self.weights[f"{self.name}.{factor}"]


@dataclass(frozen=True, slots=True)
class ProjectionBackward:
    """Backward of a projection. Both methods may be called, in any order.

    Attributes:
        projection: The projection.
        dy_CO: Gradient of its result.
        du_Cr: Gradient of ``x A'``, which is ``s dy B``; None without an adapter.
    """

    projection: Projection
    dy_CO: Tensor
    du_Cr: Tensor | None

    def input_gradient(self, *, add_to_CI: Tensor | None = None) -> Tensor:
        """Return the gradient of the input, ``[C, I]``, added to ``add_to_CI`` if given."""
        weight_OI = self.projection.weight_OI
        if add_to_CI is None:
            add_to_CI = input_gradient(self.dy_CO, weight_OI)
        else:
            add_product_(add_to_CI, self.dy_CO, weight_OI)
        if self.du_Cr is not None:
            add_product_(add_to_CI, self.du_Cr, self.projection.factor(LORA_A))
        return add_to_CI

    def parameter_gradients(self, x_CI: Tensor, gradients: GradientSink) -> None:
        """Give the operands of the gradients of the parameters that train to ``gradients``.

        Args:
            x_CI: Input of the projection.
            gradients: Sink, which owns ``x_CI`` and the gradient of the result from now on.
        """
        name, weights = self.projection.name, self.projection.weights
        if gradients.trains(f"{name}.weight"):
            gradients.product(f"{name}.weight", dy_CO=self.dy_CO, x_CI=x_CI)
        # With Megatron one rank alone holds the bias of a sum over the ranks.
        if f"{name}.bias" in weights and gradients.trains(f"{name}.bias"):
            gradients.token_sum(f"{name}.bias", dy_CO=self.dy_CO)
        if self.du_Cr is None:
            return
        if gradients.trains(f"{name}.{LORA_B}"):
            u_Cr = self.projection.inner(x_CI)
            gradients.product(f"{name}.{LORA_B}", dy_CO=self.dy_CO, x_CI=u_Cr)
        if gradients.trains(f"{name}.{LORA_A}"):
            gradients.product(f"{name}.{LORA_A}", dy_CO=self.du_Cr, x_CI=x_CI)


def backward_of_all(
    projections: Sequence[ProjectionBackward], x_CI: Tensor, gradients: GradientSink
) -> Tensor:
    """Return the gradient of the common input of projections, ``[C, I]``.

    Args:
        projections: Backwards of the projections.
        x_CI: Their input.
        gradients: Sink of the gradients of their parameters, which owns all operands from now on.
    """
    first, *others = projections
    dx_CI = first.input_gradient()
    for back in others:
        back.input_gradient(add_to_CI=dx_CI)
    for back in projections:
        back.parameter_gradients(x_CI, gradients)
    return dx_CI
