"""Embedding and head of the model, on the ranks that hold the first and the last layer.

Forward of the head computes the loss and the gradient of the head's input, tile by tile, so logits
are never kept for backward.

Legend: C tokens of the unit, E hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn import functional

from sppo.activations.activation_layout import ActivationKey
from sppo.config.model import ModelConfig
from sppo.engine.providers.gradients import GradientProvider, gradients_of
from sppo.engine.providers.weights import WeightProvider, visit
from sppo.engine.unit import Unit
from sppo.kernels.cross_entropy import (
    LossTerms,
    linear_cross_entropy,
    linear_cross_entropy_with_gradient,
)
from sppo.model.gradients import GradientSum
from sppo.model.layer import Weights, norm, norm_backward
from sppo.offload.block_store import BlockStore
from sppo.schedule.actions import UnitKey


class Ends(Protocol):
    """Computation before the first layer, the embedding, and after the last, the loss."""

    def embed(self, unit: Unit) -> Tensor:
        """Return the input of the first layer, ``[C, E]``."""
        ...

    def embed_backward(self, unit: Unit, dx_CE: Tensor) -> None:
        """Add the gradients of the embedding, given the gradient of the first layer's input."""
        ...

    def loss(self, unit: Unit, x_CE: Tensor, loss_scale: float | None) -> None:
        """Compute the losses of a unit from the last layer's output; in training, also gradients.

        Args:
            unit: Unit to compute; its labels are read.
            x_CE: Output of the last layer.
            loss_scale: Factor of the summed loss; None computes losses only.
        """
        ...

    def take_loss_gradient(self, unit: Unit) -> Tensor:
        """Return the gradient ``[C, E]`` of the last layer's output, once per unit."""
        ...


class ModelEnds:
    """:class:`Ends` of whole units.

    Args:
        model: Model configuration.
        weights: Provider of the parameters of the embedding and the head.
        gradients: Provider of buffers to add gradients to; None for evaluation only.
        store: Store of saved tensors of the rank.
        loss_terms: Terms that training adds to the cross entropy; evaluation adds none.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        weights: WeightProvider,
        gradients: GradientProvider | None,
        store: BlockStore,
        loss_terms: LossTerms,
    ) -> None:
        self._model, self._store, self._loss_terms = model, store, loss_terms
        self._weights, self._gradients = weights, gradients
        self._head = "embed.weight" if model.tie_embeddings else "head.weight"
        self._token_losses: dict[UnitKey, Tensor] = {}

    def embed(self, unit: Unit) -> Tensor:
        """Return the input of the first layer, ``[C, E]``."""
        with visit(self._weights, "embedding") as weights:
            x = functional.embedding(unit.tokens_C, weights["embed.weight"])
            if self._model.position == "learned":
                x = x + functional.embedding(unit.positions_C, weights["positions.weight"])
        return x

    def embed_backward(self, unit: Unit, dx_CE: Tensor) -> None:
        """Add the gradients of the embedding, given the gradient of the first layer's input."""
        assert self._gradients is not None, "training needs gradient buffers"
        with gradients_of(self._gradients, "embedding") as totals:
            embed = totals["embed.weight"]
            embed.index_add_(0, unit.tokens_C, dx_CE.to(embed.dtype))
            if self._model.position == "learned":
                positions = totals["positions.weight"]
                positions.index_add_(0, unit.positions_C, dx_CE.to(positions.dtype))

    def loss(self, unit: Unit, x_CE: Tensor, loss_scale: float | None) -> None:
        """Compute the losses of a unit; in training, save the gradient of ``x_CE``, too."""
        with visit(self._weights, "head") as weights:
            hidden = norm(self._model, "final_norm", x_CE, weights)
            if loss_scale is None:
                losses = linear_cross_entropy(hidden, weights[self._head], unit.labels_C)
            else:
                losses = self._loss_and_gradient(unit, x_CE, hidden, weights, loss_scale)
        self._token_losses[unit.key] = losses

    def take_loss_gradient(self, unit: Unit) -> Tensor:
        """Return the gradient ``[C, E]`` of the last layer's output, computed in forward."""
        _, retained = self._store.get(self._key(unit))
        return retained["dx"]

    def take_losses(self) -> dict[UnitKey, Tensor]:
        """Return the unscaled losses ``[C]`` of the units since the last call, by unit."""
        losses, self._token_losses = self._token_losses, {}
        return losses

    def _loss_and_gradient(
        self, unit: Unit, x_CE: Tensor, hidden_CE: Tensor, weights: Weights, loss_scale: float
    ) -> Tensor:
        """Return the losses ``[C]``, add the head's gradients, and save the gradient of ``x_CE``.

        ``hidden_CE`` is ``x_CE`` after the final norm.
        """
        assert self._gradients is not None, "training needs gradient buffers"
        with gradients_of(self._gradients, "head") as totals:
            losses, dhidden = linear_cross_entropy_with_gradient(
                hidden_CE,
                weights[self._head],
                unit.labels_C,
                scale=loss_scale,
                dweight_VE=totals[self._head],
                terms=self._loss_terms,
            )
            sink = GradientSum(totals)
            dx = norm_backward(self._model, "final_norm", dhidden, x_CE, weights, sink)
        self._store.put(self._key(unit), retained={"dx": dx})
        return losses

    def _key(self, unit: Unit) -> ActivationKey:
        """Return the key of the head, the layer after the last one."""
        return ActivationKey(*unit.key, self._model.num_layers)
