"""Parameters that train: all of them, those that globs match, or low-rank adapters (LoRA).

An adapter adds two factors to a projection W ``[O, I]`` of a layer: ``q.lora_a`` ``[r, I]`` and
``q.lora_b`` ``[O, r]`` beside ``q.weight``. The layer then computes y = x W' + s (x A') B'. A
parameter that does not train is frozen: it has no gradient and no optimizer state. The first layers
have no backward if nothing trains in them or below them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod
from typing import Any

from sppo.config.adapter import TARGETS, AdapterConfig
from sppo.config.model import ModelConfig
from sppo.config.run import RunConfig
from sppo.cost.parameter_groups import matches_none
from sppo.cost.parameters import (
    COLUMNS,
    Shape,
    active_parameters,
    layer_shapes,
    outer_parts,
    parameter_shapes,
    stage_shapes,
)
from sppo.units import format_count

LORA_A, LORA_B = "lora_a", "lora_b"
_WHOLE = {"norms": ("*norm.*",), "embed": ("embed.*",), "head": ("head.*",)}


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank adapters of some projections.

    Attributes:
        rank: Rows of A and columns of B.
        scale: Factor s of the product of both.
        targets: Projections that get adapters, of :data:`sppo.config.adapter.TARGETS`; those that a
            model does not have are ignored. Those of an MLP are also those of an MLP that is shared
            beside experts.
        layers: Layers that get adapters; None for all.
    """

    rank: int
    scale: float
    targets: tuple[str, ...] = TARGETS
    layers: tuple[int, ...] | None = None

    def shapes(self, model: ModelConfig, layer: int) -> dict[str, Shape]:
        """Return the shapes of the factors of a layer, by name without ``layers.i.``."""
        if self.layers is not None and layer not in self.layers:
            return {}
        found: dict[str, Shape] = {}
        sides = _adapted(layer_shapes(model, layer), self.targets)
        for name, (outputs, inputs) in sides.items():
            found[f"{name}.{LORA_A}"] = (self.rank, inputs)
            found[f"{name}.{LORA_B}"] = (outputs, self.rank)
        return found


@dataclass(frozen=True, slots=True)
class Trainable:
    """Parameters of a run, with the factors of its adapters, and which of them train.

    Attributes:
        adapter: Low-rank adapters, which train; None without.
        only: Globs of the names of the other parameters that train; None if all train.
    """

    adapter: Adapter | None = None
    only: tuple[str, ...] | None = None

    @property
    def is_everything(self) -> bool:
        """True if all parameters of the model train, without adapters."""
        return self == EVERYTHING

    def trains(self, name: str) -> bool:
        """Return whether the parameter with a global name trains."""
        if self.only is None or is_factor(name):
            return True
        return any(fnmatchcase(name, glob) for glob in self.only)

    def layer_shapes(self, model: ModelConfig, layer: int) -> dict[str, Shape]:
        """Return the shapes of all parameters of a layer, factors included, by name within it."""
        factors = {} if self.adapter is None else self.adapter.shapes(model, layer)
        return layer_shapes(model, layer) | factors

    def trained_names(self, model: ModelConfig, layer: int) -> frozenset[str]:
        """Return the names within a layer of its parameters that train."""
        names = self.layer_shapes(model, layer)
        return frozenset(name for name in names if self.trains(f"layers.{layer}.{name}"))

    def stage_shapes(self, model: ModelConfig, layers: range) -> dict[str, Shape]:
        """Return the shapes of all parameters of a stage, by global name (:func:`stage_shapes`)."""
        return stage_shapes(model, layers) | self.factor_shapes(model, layers)

    def parameter_shapes(self, model: ModelConfig) -> dict[str, Shape]:
        """Return the shapes of all parameters, factors last, by global name."""
        return parameter_shapes(model) | self.factor_shapes(model, range(model.num_layers))

    def factor_shapes(self, model: ModelConfig, layers: range) -> dict[str, Shape]:
        """Return the shapes of the factors of some layers, by global name."""
        if self.adapter is None:
            return {}
        return {
            f"layers.{layer}.{name}": shape
            for layer in layers
            for name, shape in self.adapter.shapes(model, layer).items()
        }

    def has_factors_of(self, other: Trainable, model: ModelConfig) -> bool:
        """Return whether two runs of a model have the same factors with the same scale."""
        every = range(model.num_layers)
        scales = [None if one.adapter is None else one.adapter.scale for one in (self, other)]
        same_shapes = self.factor_shapes(model, every) == other.factor_shapes(model, every)
        return same_shapes and scales[0] == scales[1]

    def trained_shapes(self, model: ModelConfig) -> dict[str, Shape]:
        """Return the shapes of the parameters that train, by global name."""
        shapes = self.parameter_shapes(model)
        return {name: shape for name, shape in shapes.items() if self.trains(name)}


EVERYTHING = Trainable()
"""All parameters of the model train, without adapters."""


def _adapted(shapes: Mapping[str, Shape], targets: Collection[str]) -> dict[str, Shape]:
    """Return the shapes of the weights of a layer that get adapters, by projection."""
    names = (f"{prefix}{target}" for prefix in ("", "shared_") for target in targets)
    return {name: shapes[f"{name}.weight"] for name in names if f"{name}.weight" in shapes}


def is_factor(name: str) -> bool:
    """Return whether a parameter is a factor of an adapter."""
    return name.endswith((f".{LORA_A}", f".{LORA_B}"))


def is_whole_factor(name: str) -> bool:
    """Return whether every device of a group that shards a layer (Megatron) has a factor whole.

    One side of a factor is as wide as the rank. The other one is sharded as that of its weight is:
    the rows of B beside a weight that is sharded by rows, the columns of A beside one by columns.
    """
    target, _, factor = name.rpartition(".")
    whole = LORA_B if target.rpartition(".")[-1] in COLUMNS else LORA_A
    return factor == whole


@lru_cache(maxsize=256)
def layers_without_backward(model: ModelConfig, trainable: Trainable) -> int:
    """Return the number of first layers without a backward: nothing trains in or below them.

    The last layer has a backward even if only the head trains.
    """
    if trains_embedding(model, trainable):
        return 0
    last = model.num_layers - 1
    return next((layer for layer in range(last) if trainable.trained_names(model, layer)), last)


def layers_with_backward(model: ModelConfig, trainable: Trainable, *, layers: range) -> range:
    """Return the layers of a stage that have a backward, which may be none."""
    first = layers_without_backward(model, trainable)
    return range(min(max(first, layers.start), layers.stop), layers.stop)


def trains_embedding(model: ModelConfig, trainable: Trainable) -> bool:
    """Return whether the embedding or learned positions train, a tied embedding included."""
    before, _ = outer_parts(model)
    return any(map(trainable.trains, before))


def trains_head(model: ModelConfig, trainable: Trainable) -> bool:
    """Return whether the vocabulary projection trains, be it tied to the embedding or not."""
    return trainable.trains("embed.weight" if model.tie_embeddings else "head.weight")


def trainable_of(
    adapter: AdapterConfig | None, only: tuple[str, ...] | None, *, model: ModelConfig
) -> Trainable:
    """Return the parameters that train with a section ``adapter``, or a key ``train.only``.

    Args:
        adapter: Adapters of a run; None without.
        only: Globs of the parameters that train; None for all.
        model: Model of the run.
    """
    if adapter is None:
        return Trainable(only=only)
    whole: list[str] = []
    for kind in adapter.also_train:
        is_tied = kind == "head" and model.tie_embeddings
        whole += _WHOLE["embed" if is_tied else kind]
    return Trainable(
        Adapter(adapter.rank, adapter.scale, adapter.targets or TARGETS, adapter.layers),
        tuple(whole),
    )


def trainable_of_run(run: RunConfig) -> Trainable:
    """Return the parameters that train in a run."""
    return trainable_of(run.adapter, run.train.only, model=run.model)


def trainable_of_sections(sections: Mapping[str, Any]) -> Trainable:
    """Return the parameters that train in a run whose sections are plain values."""
    adapter, only = sections.get("adapter"), sections["train"].get("only")
    return trainable_of(
        None if adapter is None else AdapterConfig.model_validate(adapter),
        None if only is None else tuple(only),
        model=ModelConfig.model_validate(sections["model"]),
    )


def trainable_problems(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield each key that does not suit the parameters of the model, and the rule that it breaks.

    Every glob of ``train.only`` matches a parameter, and no rank exceeds a side of a target.
    """
    names = list(parameter_shapes(run.model))
    for glob in run.train.only or ():
        if not any(fnmatchcase(name, glob) for name in names):
            yield "train.only", f"train.only: {matches_none(glob, names)}"
    if run.adapter is None:
        return
    first, last = (layer_shapes(run.model, layer) for layer in (0, run.model.num_layers - 1))
    sides = _adapted(first | last, run.adapter.targets or TARGETS)
    smallest = min(sides, key=lambda name: min(sides[name]))
    outputs, inputs = sides[smallest]
    if run.adapter.rank > min(outputs, inputs):
        yield (
            "adapter.rank",
            f"adapter.rank {run.adapter.rank}: {smallest} is {outputs} x {inputs}, so its change "
            f"has a rank of at most {min(outputs, inputs)}; lower it to that, or leave out "
            "adapter.targets that are so small",
        )


def check_trainable(run: RunConfig) -> None:
    """Raise ValueError if what trains in a run cannot be what is meant."""
    for _, rule in trainable_problems(run):
        raise ValueError(rule)


@lru_cache(maxsize=256)
def parameter_counts(model: ModelConfig, trainable: Trainable) -> tuple[int, int]:
    """Return the numbers of scalars that train, and of all, factors included."""
    trained, total = (
        sum(map(prod, shapes.values()))
        for shapes in (trainable.trained_shapes(model), trainable.parameter_shapes(model))
    )
    return trained, total


def counts_text(run: RunConfig) -> str:
    """Return the number of parameters of a run, and of those that train if not all do.

    With experts also the number of the model's parameters that each token passes through.
    """
    trainable = trainable_of_run(run)
    trained, total = map(format_count, parameter_counts(run.model, trainable))
    active = ""
    if run.model.experts is not None:
        active = f", {format_count(active_parameters(run.model))} active"
    if trainable.is_everything:
        return f"{total} parameters{active}"
    return f"{trained} of {total} parameters train{active}"
