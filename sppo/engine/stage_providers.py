"""Inputs of a stage that runs a unit: weights, sinks of gradients, keys and values, and the ends.

The ends of the model are its embedding, on the rank with the first layer, and its head, on the rank
with the last. Forward of the head computes the loss and the gradient of the head's input, tile by
tile, so logits are never kept for backward. The head's norm, projection and loss run on the tokens
whose label counts only.

Legend: C tokens of the unit, L of these with a label that counts, E hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from sppo.activations.activation_layout import ActivationKey
from sppo.config.model import ModelConfig
from sppo.cost.trainable import EVERYTHING, Trainable
from sppo.engine.attention.kv_store import KVStore, StoredKV
from sppo.engine.attention.partial_kv import PartialKV
from sppo.engine.expert_loads import ExpertLoads
from sppo.engine.providers.gradients import GradientProvider, gradients_of
from sppo.engine.providers.weights import PartProvider, WeightProvider, visit
from sppo.engine.recurrence.state_store import StateStore
from sppo.engine.unit import Unit
from sppo.kernels.cross_entropy import (
    LossTerms,
    linear_cross_entropy,
    linear_cross_entropy_with_gradient,
)
from sppo.model.gradients import GradientSink, GradientSum
from sppo.model.layer import Weights
from sppo.model.norms import norm, norm_backward
from sppo.offload.block_store import BlockStore
from sppo.schedule.actions import UnitKey


@dataclass
class StageProviders:
    """Providers of the units that the rank of a stage runs alone; MSP shards have others.

    Attributes:
        model: Model configuration.
        own_weights: Provider of the parameters of the rank's stages, in the compute dtype.
        gradients: Provider of buffers to add gradients to; None for evaluation only.
        saved: Store of saved tensors of the rank.
        kv_store: Store of keys and values of the rank.
        states: Store of the states of linear attention of the rank.
        loss_terms: Terms that training adds to the cross entropy; evaluation adds none.
        results: Unscaled losses and correctness, ``[L]`` each, of the units that were computed.
        trainable: Parameters that train; `gradients` has buffers of no others.
        loads: Loads of the experts, and the terms of their routers.
    """

    model: ModelConfig
    own_weights: WeightProvider
    gradients: GradientProvider | None
    saved: BlockStore
    kv_store: KVStore
    states: StateStore
    loss_terms: LossTerms
    loads: ExpertLoads
    results: dict[UnitKey, tuple[Tensor, Tensor]] = field(default_factory=dict)
    trainable: Trainable = EVERYTHING

    def __post_init__(self) -> None:
        self.weights: PartProvider = self.own_weights
        """Provider of the weights of the layers."""
        self._head = "embed.weight" if self.model.tie_embeddings else "head.weight"
        scale = torch.tensor(self.model.embedding_scale, dtype=self.own_weights.dtype)
        self._embedding_scale = scale.item()
        """Factor of the embedding, rounded as Gemma's models round it."""

    def begin(self, unit: Unit, layers: Sequence[int], *, forward: bool) -> None:
        """Prepare for a pass of ``unit`` through ``layers``, in this order.

        Does nothing here: the layers of all units were announced at the start of the step.
        """

    @contextmanager
    def sink(self, unit: Unit, layer: int) -> Iterator[GradientSink]:
        """Yield the sink of a layer's gradients, which are in the sums on exit."""
        assert self.gradients is not None, "training needs gradient buffers"
        with gradients_of(self.gradients, layer) as totals:
            yield GradientSum(totals)

    def kv(self, unit: Unit, layer: int, *, partial: bool) -> StoredKV:
        """Return the keys and values that the queries of ``unit`` see in a layer.

        Args:
            unit: Unit with the queries.
            layer: Index of the layer, which has a window if `partial`.
            partial: Whether only the keys and values are kept that later units see.
        """
        kind = PartialKV if partial else StoredKV
        window = self.model.layer_type(layer).window
        return kind(self.kv_store, layer, unit.sequence, unit.span, window=window)

    def embed(self, unit: Unit) -> Tensor:
        """Return the input of the first layer, ``[C, E]``."""
        with visit(self.own_weights, "embedding") as weights:
            x = functional.embedding(unit.tokens_C, weights["embed.weight"])
            if self._embedding_scale != 1:
                x.mul_(self._embedding_scale)
            if self.model.position == "learned":
                x = x + functional.embedding(unit.positions_C, weights["positions.weight"])
        return x

    def embed_backward(self, unit: Unit, dx_CE: Tensor) -> None:
        """Add the gradients of the embedding, given the gradient of the first layer's input."""
        assert self.gradients is not None, "training needs gradient buffers"
        with gradients_of(self.gradients, "embedding") as totals:
            for name, rows_C, scale in (
                ("embed.weight", unit.tokens_C, self._embedding_scale),
                ("positions.weight", unit.positions_C, 1.0),
            ):
                if name in totals:
                    dx = dx_CE.to(totals[name].dtype)
                    totals[name].index_add_(0, rows_C, dx, alpha=scale)

    def loss(self, unit: Unit, x_CE: Tensor, loss_scale: float | None) -> None:
        """Compute the losses of a unit; in training, save the gradient of ``x_CE``, too.

        Args:
            unit: Unit to compute; its labels are read.
            x_CE: Output of the last layer.
            loss_scale: Factor of the summed loss; None computes losses only.
        """
        with visit(self.own_weights, "head") as weights:
            if loss_scale is None:
                hidden = norm(self.model, "final_norm", _counting(unit, x_CE), weights)
                results = linear_cross_entropy(
                    hidden,
                    weights[self._head],
                    unit.labels.labels_L,
                    logits_scale=self.model.logits_scale,
                )
            else:
                results = self._loss_and_gradient(unit, x_CE, weights, loss_scale)
        self.results[unit.key] = results

    def take_loss_gradient(self, unit: Unit) -> Tensor:
        """Return the gradient ``[C, E]`` of the last layer's output, once per unit."""
        _, retained = self.saved.get(self._key(unit))
        return retained["dx"]

    def _loss_and_gradient(
        self, unit: Unit, x_CE: Tensor, weights: Weights, loss_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the results ``[L]``, add the head's gradients, and save the gradient of ``x_CE``.

        The rows of ``x_CE`` are selected twice, so that they take no memory during the projection.
        """
        assert self.gradients is not None, "training needs gradient buffers"
        with gradients_of(self.gradients, "head") as totals:
            hidden_LE = norm(self.model, "final_norm", _counting(unit, x_CE), weights)
            losses_L, correct_L, dhidden_LE = linear_cross_entropy_with_gradient(
                hidden_LE,
                weights[self._head],
                unit.labels.labels_L,
                scale=loss_scale,
                dweight_VE=totals.get(self._head),
                terms=self.loss_terms,
                logits_scale=self.model.logits_scale,
            )
            del hidden_LE
            x_LE, sink = _counting(unit, x_CE), GradientSum(totals)
            dx = norm_backward(self.model, "final_norm", dhidden_LE, x_LE, weights, sink)
        if unit.labels.rows_L is not None:
            del dhidden_LE, x_LE
            dx = torch.zeros_like(x_CE).index_copy_(0, unit.labels.rows_L, dx)
        self.saved.put(self._key(unit), retained={"dx": dx})
        return losses_L, correct_L

    def _key(self, unit: Unit) -> ActivationKey:
        """Return the key of the head, the layer after the last one."""
        return ActivationKey(*unit.key, self.model.num_layers)


def _counting(unit: Unit, x_CE: Tensor) -> Tensor:
    """Return the rows of ``x_CE`` whose label counts: ``x_CE`` itself if all do, else a copy."""
    rows_L = unit.labels.rows_L
    return x_CE if rows_L is None else x_CE.index_select(0, rows_L)
