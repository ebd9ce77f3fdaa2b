"""Queries, keys and values of one layer: projections, norms of q and k, and rotation.

Legend: C tokens, E hidden, H heads (query or key/value), N query heads, K key/value heads, D head
size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sppo.config.model import ModelConfig
from sppo.kernels.rotary import RotaryTable, rotate, rotate_backward
from sppo.model.gradients import GradientSink
from sppo.model.norms import norm, norm_backward
from sppo.model.projection import Projection


@dataclass(frozen=True, slots=True)
class Heads:
    """Arithmetic of the heads of one layer, forward and backward.

    Attributes:
        model: Shape of the model; the number of heads follows the weights.
        weights: Weights of the layer, by name within it.
        rotary: Angles of the tokens; None without rotation.
        adapter_scale: Factor of the product of the factors of an adapter.
    """

    model: ModelConfig
    weights: Mapping[str, Tensor]
    rotary: RotaryTable | None
    adapter_scale: float = 1.0

    def project(self, name: str, n1_CE: Tensor) -> Tensor:
        """Return the projection "q", "k" or "v" of the tokens, ``[C, H, D]``."""
        projected = self.projection(name).forward(n1_CE)
        return projected.view(projected.shape[0], -1, self.model.head_dim)

    def norm_and_rotate(self, name: str, x_CHD: Tensor, *, first: int = 0) -> Tensor:
        """Return projected queries or keys after their norm, if any, and rotation, if any.

        Args:
            name: "q" or "k".
            x_CHD: Projections of the tokens from number ``first`` on.
            first: Number of tokens that ``x_CHD`` leaves out.
        """
        if self.model.qk_norm:
            rows = self._normed_rows(x_CHD)
            x_CHD = norm(self.model, f"{name}_norm", rows, self.weights).view(x_CHD.shape)
        if self.rotary is None:
            return x_CHD
        return rotate(x_CHD, RotaryTable(self.rotary.cos[first:], self.rotary.sin[first:]))

    def norm_and_rotate_backward(
        self,
        name: str,
        d_CHD: Tensor,
        projected_CHD: Tensor | None,
        gradients: GradientSink,
    ) -> Tensor:
        """Return the gradient of the projection; ``projected_CHD`` is needed for a norm only."""
        if self.rotary is not None:
            d_CHD = rotate_backward(d_CHD, self.rotary)
        if not self.model.qk_norm:
            return d_CHD
        assert projected_CHD is not None, "q/k-norm needs its input"
        rows, d_rows = map(self._normed_rows, (projected_CHD, d_CHD))
        dx = norm_backward(self.model, f"{name}_norm", d_rows, rows, self.weights, gradients)
        return dx.view(d_CHD.shape)

    def _normed_rows(self, x_CHD: Tensor) -> Tensor:
        """Return the rows that q/k-norm norms: each head by itself, or all heads of a token."""
        return x_CHD.flatten(1) if self.model.qk_norm == "all" else x_CHD

    def projection(self, name: str) -> Projection:
        """Return a projection to or from the heads, such as "q" or "o"."""
        return Projection(name, self.weights, self.adapter_scale)
