"""Settings of a Hugging Face ``config.json``, each of which reads and writes some model fields.

Errors name the key and the value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sppo.config.model import ModelConfig
from sppo.quoting import quoted

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Key:
    """One key that has the value of one model field."""

    field: str
    key: str
    parse: Callable[[Json, str], Any]
    """Returns the value under a key, such as :func:`integer`."""
    if_null: Callable[[Json], Any] | None = None
    """Returns the field if the key is absent or null; None if ``parse`` decides."""
    also: str | None = None
    """Older name of the key, which is written as well."""

    @property
    def is_required_size(self) -> bool:
        """True if the key holds a size that a configuration must name."""
        return self.parse is integer and self.if_null is None

    def read(self, config: Json) -> dict[str, Any]:
        """Return the model field."""
        if self.if_null is not None and config.get(self.key) is None:
            return {self.field: self.if_null(config)}
        return {self.field: self.parse(config, self.key)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key; no key for a field that is null."""
        value = getattr(model, self.field)
        names = [name for name in (self.key, self.also) if name is not None]
        return {} if value is None else dict.fromkeys(names, value)


@dataclass(frozen=True, slots=True)
class Choice:
    """One key with words that stand for values of one model field."""

    field: str
    key: str
    words: Mapping[str, str]
    """Value of the field by word; the first word of a value is written."""

    def read(self, config: Json) -> dict[str, Any]:
        """Return the model field."""
        word = config[self.key]
        if not isinstance(word, str) or word not in self.words:
            raise refusal(self.key, word, ", ".join(self.words))
        return {self.field: self.words[word]}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key."""
        value = getattr(model, self.field)
        return {self.key: next(word for word, ours in self.words.items() if ours == value)}


@dataclass(frozen=True, slots=True)
class Windows:
    """Keys of the sliding window, and of the layers that have it."""

    used: Literal["never", "always", "in last layers"]
    """always: in all layers if there is a window; in last layers: if a flag says so."""

    def read(self, config: Json) -> dict[str, Any]:
        """Return the window, and the first layer that has it."""
        layers = integer(config, "num_hidden_layers")
        window, first = None, layers
        if self._is_used(config):
            window, first = integer(config, "sliding_window"), self._first_layer(config)
        kinds = config.get("layer_types")
        if kinds is not None:
            first = _first_sliding(kinds, layers=layers, windowed=window is not None)
            if self.used == "always" and window is not None and first > 0:
                raise refusal("layer_types", kinds, "sliding_attention in all layers")
        if first >= layers:
            window, first = None, 0
        kinds = ["full"] * first + ["sliding"] * (layers - first)
        return {"sliding_window": window, "layer_types": kinds if first else None}

    def _is_used(self, config: Json) -> bool:
        if self.used == "in last layers" and not flag(config, "use_sliding_window"):
            return False
        return self.used != "never" and config.get("sliding_window") is not None

    def _first_layer(self, config: Json) -> int:
        if self.used == "always":
            return 0
        first = config.get("max_window_layers")
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise refusal("max_window_layers", first, "a whole number of at least 0")
        return first

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys; none if the family has no windows."""
        windows = [model.layer_type(layer).window for layer in range(model.num_layers)]
        window = windows[-1]
        if self.used == "never":
            return {}
        if self.used == "always":
            return {"sliding_window": window}
        first = model.num_layers if window is None else windows.index(window)
        return {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": first,
        }


def _first_sliding(kinds: object, *, layers: int, windowed: bool) -> int:
    """Return the index of the first sliding-attention layer; `layers` if there is none."""
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise refusal("layer_types", kinds, f"one entry for each of {layers} layers")
    first = next((i for i, kind in enumerate(kinds) if kind != "full_attention"), layers)
    if any(kind != "sliding_attention" for kind in kinds[first:]):
        raise refusal(
            "layer_types", kinds, "full_attention layers followed by sliding_attention layers"
        )
    if first < layers and not windowed:
        raise refusal("layer_types", kinds, "full_attention only, as no sliding_window is in use")
    return first


def refusal(key: str, value: object, supported: str) -> ValueError:
    """Return the error for a setting that SPPO cannot represent exactly."""
    return ValueError(f"config.json has {key} {quoted(value)}; supported: {supported}")


def require(values: Json, keys: Iterable[str]) -> None:
    """Raise ValueError if some `keys` are missing or null; the message lists all of them."""
    absent = [key for key in keys if values.get(key) is None]
    if absent:
        raise ValueError(f"config.json lacks {', '.join(absent)}")


def integer(values: Json, key: str) -> int:
    """Return the whole number under `key`; raise ValueError unless it is one of at least 1."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise refusal(key, value, "a whole number of at least 1")
    return value


def number(values: Json, key: str) -> float:
    """Return the number under `key`; raise ValueError unless it is finite as a float."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise refusal(key, value, "a number")
    try:
        found = float(value)
    except OverflowError:  # a whole number of hundreds of digits
        found = math.inf
    if not math.isfinite(found):
        raise refusal(key, value, "a finite number")
    return found


def flag(values: Json, key: str) -> bool:
    """Return the boolean under `key`, False if absent or null; raise ValueError for others."""
    value = values.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise refusal(key, value, "true or false")
    return value
