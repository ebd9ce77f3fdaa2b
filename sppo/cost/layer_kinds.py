"""Kinds of layers: those of one kind have the same parameters and take equally long.

Layers differ by their type (window, rotation, experts), by the factors of adapters that they have,
by what trains in them, and by whether they have a backward.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import prod
from typing import NamedTuple

from sppo.config.model import LayerType, LinearAttention, ModelConfig
from sppo.cost.parameters import Shape
from sppo.cost.trainable import LORA_A, Trainable, layers_without_backward

Shapes = tuple[tuple[str, Shape], ...]
"""Names of parameters within a layer, and their shapes."""


class LayerKind(NamedTuple):
    """Properties of a layer on which its costs depend, beside the shape of the model."""

    type: LayerType
    """Attention, rotation and MLP of the layer."""
    shapes: Shapes
    """All parameters, factors of adapters included."""
    trained: frozenset[str]
    """Names of the parameters that train."""
    has_backward: bool
    """Whether anything trains in the layer or below it."""
    experts_per_token: int = 0
    """k: number of experts that each token passes through; 0 without experts."""
    linear: LinearAttention | None = None
    """Linear attention of the layer; None if it has attention, with K and V."""

    @property
    def window(self) -> int | None:
        """Sliding window; None for full attention."""
        return self.type.window

    @property
    def matrices(self) -> Shapes:
        """Weights and factors by which tokens are multiplied; those of experts are stacked.

        Those of the convolution of linear attention multiply element-wise.
        """
        return tuple(
            (name, shape)
            for name, shape in self.shapes
            if len(shape) > 1 and not name.endswith(".bias") and not name.startswith("conv_")
        )

    @property
    def recomputed_factors(self) -> Shapes:
        """Factors A, whose outputs are not saved: backward needs them for gradients of B."""
        return tuple((name, shape) for name, shape in self.shapes if name.endswith(LORA_A))

    @property
    def repeated(self) -> Shapes:
        """Weights whose products backward repeats, whatever is saved.

        They are factors A, routers before and after the experts, and, where the output of a shared
        MLP is switched, both of its last projections.
        """
        switch = self.projections("shared_switch")
        switched = (*switch, *self.projections("shared_down")) if switch else ()
        return (*self.recomputed_factors, *self.projections("router") * 2, *switched)

    @property
    def trained_shapes(self) -> Shapes:
        """Parameters that train."""
        return tuple((name, shape) for name, shape in self.shapes if name in self.trained)

    @property
    def trained_matrices(self) -> Shapes:
        """Weights and factors that train."""
        return tuple((name, shape) for name, shape in self.matrices if name in self.trained)

    def projections(self, *names: str) -> Shapes:
        """Return the weights of some projections with their factors, in the order of `names`."""
        return tuple(
            own for name in names for own in self.matrices if own[0].startswith(f"{name}.")
        )

    def weights_per_token(self, matrices: Shapes) -> int:
        """Return the number of weights by which each token is multiplied.

        Of the experts of a layer, a token is multiplied by those that it has chosen.
        """
        return sum(
            prod(shape[-2:]) * (self.experts_per_token if is_stacked(shape) else 1)
            for _, shape in matrices
        )


@lru_cache(maxsize=256)
def layer_kinds(model: ModelConfig, trainable: Trainable) -> tuple[LayerKind, ...]:
    """Return the kind of every layer; cached."""
    first, found = layers_without_backward(model, trainable), []
    for layer in range(model.num_layers):
        shapes = trainable.layer_shapes(model, layer)
        trained, kind = trainable.trained_names(model, layer), model.layer_type(layer)
        experts, linear = model.experts_of(kind), model.linear_attention_of(kind)
        per_token = 0 if experts is None else experts.per_token
        own = kind, (*shapes.items(),), trained, layer >= first, per_token, linear
        found.append(LayerKind(*own))
    return tuple(found)


@lru_cache(maxsize=256)
def num_rotations(model: ModelConfig, trainable: Trainable) -> int:
    """Return the number of different rotations of q and k that the layers have; cached."""
    return len({kind.type.rotation for kind in layer_kinds(model, trainable)} - {None})


@lru_cache(maxsize=128)
def count_kinds(
    model: ModelConfig, trainable: Trainable, stages: tuple[range, ...]
) -> tuple[Counter[LayerKind], ...]:
    """Return the number of layers of each kind in each stage; cached, must not be modified."""
    kinds = layer_kinds(model, trainable)
    return tuple(Counter(kinds[layers.start : layers.stop]) for layers in stages)


@lru_cache(maxsize=128)
def patterns_of_stages(
    model: ModelConfig, trainable: Trainable, stages: tuple[range, ...]
) -> tuple[int, ...]:
    """Return a number for each stage, equal where the layers are of equal kinds in equal order."""
    kinds, found = layer_kinds(model, trainable), dict[tuple[LayerKind, ...], int]()
    return tuple(found.setdefault(kinds[own.start : own.stop], len(found)) for own in stages)


def kinds_of_model(model: ModelConfig, trainable: Trainable) -> Counter[LayerKind]:
    """Return the number of layers of each kind in the whole model."""
    return count_kinds(model, trainable, (range(model.num_layers),))[0]


def is_stacked(shape: Shape) -> bool:
    """Return whether a shape is that of the stacked weights of all experts of a layer."""
    return len(shape) == 3


def elements(shapes: Shapes) -> int:
    """Return the number of scalars of parameters."""
    return sum(prod(shape) for _, shape in shapes)
