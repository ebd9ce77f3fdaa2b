"""Settings of a ``config.json`` that differ by layer: windows, rotation, dense layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sppo.config.huggingface.settings import (
    Json,
    flag,
    integer,
    layer_numbers,
    refusal,
    shortest_pattern,
    whole_number,
)
from sppo.config.model import ModelConfig

_KEY = "layer_types"
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


def never(config: Json, layer: int) -> bool:
    """Return False: no layer has a window."""
    return False


def always(config: Json, layer: int) -> bool:
    """Return True: every layer has the window."""
    return True


def from_layer(config: Json, layer: int) -> bool:
    """Return whether ``max_window_layers`` or more layers are before `layer` (Qwen)."""
    return layer >= whole_number(config, "max_window_layers")


def without_rotation(config: Json, layer: int) -> bool:
    """Return whether `layer` does not rotate q and k (SmolLM3)."""
    return not _rotated(config)[layer]


def all_but_every(period: int, *, key: str = "") -> Callable[[Json, int], bool]:
    """Return a rule that holds for all layers but the last one of each `period` layers.

    Args:
        period: Number of layers.
        key: Key with another number of layers, if there is one.
    """

    def rule(config: Json, layer: int) -> bool:
        every = period if config.get(key) is None else integer(config, key)
        return (layer + 1) % every != 0

    return rule


@dataclass(frozen=True, slots=True)
class Windows:
    """Keys of the sliding window, and of the layers that have it."""

    usual: Callable[[Json, int], bool]
    """Returns whether a layer has the window if ``layer_types`` is absent."""
    by_layer: bool = True
    """True if ``layer_types`` may differ from that rule."""
    switch: bool = False
    """True if ``use_sliding_window`` must be true for a window."""
    first: bool = False
    """True if ``max_window_layers`` is written."""

    def read(self, config: Json) -> dict[str, Any]:
        """Return the window and the layers that have it."""
        layers = layer_numbers(config)
        used = config.get("sliding_window") is not None and self.usual is not never
        if self.switch:
            used = flag(config, "use_sliding_window") and used
        usual = [used and self.usual(config, layer) for layer in layers]
        windowed = self._given(config, usual=usual, used=used)
        if not any(windowed):
            return {"sliding_window": None, _KEY: None}
        types = shortest_pattern(["sliding" if one else "full" for one in windowed])
        window = integer(config, "sliding_window")
        return {"sliding_window": window, _KEY: None if all(windowed) else types}

    def _given(self, config: Json, *, usual: list[bool], used: bool) -> list[bool]:
        """Return whether each layer has a window according to ``layer_types``."""
        types = _layer_types(config, (_FULL, _SLIDING))
        if types is None:
            return usual
        windowed = [kind == _SLIDING for kind in types]
        if any(windowed) and not used:
            raise refusal(_KEY, types, f"{_FULL} only, as no sliding_window is in use")
        if windowed != usual and not self.by_layer:
            raise refusal(_KEY, types, f"{_SLIDING} in all layers, or in none")
        return windowed

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys; none if the family has no windows."""
        if self.usual is never:
            return {}
        windows = [model.layer_type(layer).window for layer in range(model.num_layers)]
        window = next((one for one in windows if one is not None), None)
        keys: dict[str, Any] = {"sliding_window": window}
        if self.switch:
            keys["use_sliding_window"] = window is not None
        if self.first:
            keys["max_window_layers"] = windows.index(window) if window else model.num_layers
        if self.by_layer:
            keys[_KEY] = [_FULL if one is None else _SLIDING for one in windows]
        return keys


def _layer_types(config: Json, known: tuple[str, ...]) -> list[str] | None:
    """Return the types of all layers; None if the key is absent or null."""
    types, count = config.get(_KEY), len(layer_numbers(config))
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != count:
        raise refusal(_KEY, types, f"one entry for each of {count} layers")
    if any(kind not in known for kind in types):
        raise refusal(_KEY, types, ", ".join(known))
    return types


class LinearLayers:
    """Key of the layers that have linear attention (Qwen3-Next)."""

    def read(self, config: Json) -> dict[str, Any]:
        """Return the types of layers."""
        types = _layer_types(config, (_FULL, _LINEAR))
        if types is None:
            linear = all_but_every(4, key="full_attention_interval")
            types = [_LINEAR if linear(config, i) else _FULL for i in layer_numbers(config)]
        return {_KEY: shortest_pattern([kind.removesuffix("_attention") for kind in types])}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key."""
        types = [model.layer_type(layer) for layer in range(model.num_layers)]
        return {_KEY: [_LINEAR if own.linear else _FULL for own in types]}


def _rotated(config: Json) -> list[bool]:
    """Return whether each layer rotates q and k, according to ``no_rope_layers``."""
    layers, rotated = layer_numbers(config), config.get("no_rope_layers")
    if rotated is None:
        rule = all_but_every(4, key="no_rope_layer_interval")
        return [rule(config, layer) for layer in layers]
    given = isinstance(rotated, list) and all(one in (0, 1) for one in rotated)
    if not given or len(rotated) != len(layers):
        raise refusal("no_rope_layers", rotated, f"0 or 1 for each of {len(layers)} layers")
    return [bool(one) for one in rotated]


class RotaryLayers:
    """Keys of the layers that rotate q and k (SmolLM3)."""

    def read(self, config: Json) -> dict[str, Any]:
        """Return the layers that rotate."""
        pattern = shortest_pattern(_rotated(config))
        return {"rotary_layers": None if all(pattern) else pattern}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key."""
        rotations = [model.layer_type(layer).rotation for layer in range(model.num_layers)]
        return {"no_rope_layers": [int(rotation is not None) for rotation in rotations]}


class DenseLayers:
    """Keys of the layers that have an MLP in place of experts (Qwen): the first ones, or none."""

    def read(self, config: Json) -> dict[str, Any]:
        """Return the number of dense layers."""
        step, named = integer(config, "decoder_sparse_step"), config.get("mlp_only_layers") or []
        if not isinstance(named, list):
            raise refusal("mlp_only_layers", named, "a list of numbers of layers")
        dense = [i for i in layer_numbers(config) if i in named or (i + 1) % step]
        if dense != list(range(len(dense))):
            raise refusal("layers without experts", dense, "the first layers, or none")
        return {"experts.dense_layers": len(dense)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys."""
        count = 0 if model.experts is None else model.experts.dense_layers
        return {"mlp_only_layers": list(range(count)), "decoder_sparse_step": 1}
