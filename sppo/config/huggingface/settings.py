"""Settings of a Hugging Face ``config.json``, each of which reads and writes some model fields.

Fields of experts are called ``experts.count`` and so on. Writing accepts every model; reading back
what was written shows whether a family holds the model. Errors name the key and the value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sppo.config.base import MOST_LAYERS
from sppo.config.model import ModelConfig
from sppo.quoting import quoted
from sppo.units import LARGEST_SIZE

Json = Mapping[str, Any]


class Setting(Protocol):
    """One or several keys, and the model fields that they determine."""

    def read(self, config: Json) -> dict[str, Any]:
        """Return the model fields; raise ValueError for values that are not supported."""

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of any model."""


def field_of(model: ModelConfig, field: str) -> Any:
    """Return the value of a model field; that of an expert field is None without experts."""
    section, _, name = field.rpartition(".")
    return getattr(getattr(model, section) if section else model, name, None)


def score_scale(model: ModelConfig) -> float:
    """Return the factor of the attention scores."""
    return model.attention_scale or model.head_dim**-0.5


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
    form: Callable[[ModelConfig], Any] | None = None
    """Returns the value to write; None if it is the field."""

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
        """Return the key; no key for a value of null."""
        value = field_of(model, self.field) if self.form is None else self.form(model)
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
        """Return the key; its first word for a value that has none."""
        value = field_of(model, self.field)
        words = [word for word, ours in self.words.items() if ours == value]
        return {self.key: [*words, *self.words][0]}


@dataclass(frozen=True, slots=True)
class Derived:
    """A model field that other keys determine."""

    field: str
    read_from: Callable[[Json], Any]

    def read(self, config: Json) -> dict[str, Any]:
        """Return the model field."""
        return {self.field: self.read_from(config)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return no key."""
        return {}


def shortest_pattern(entries: Sequence[Any]) -> list[Any]:
    """Return the shortest beginning of `entries` that, repeated, gives all of them."""
    for length in range(1, len(entries)):
        if all(entry == entries[i % length] for i, entry in enumerate(entries)):
            return list(entries[:length])
    return list(entries)


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
    return whole_number(values, key, least=1)


def layer_numbers(values: Json) -> range:
    """Return the numbers of all layers; raise ValueError for more layers than a model can have."""
    key, count = "num_hidden_layers", integer(values, "num_hidden_layers")
    if count > MOST_LAYERS:
        raise refusal(key, count, f"at most {MOST_LAYERS}")
    return range(count)


def whole_number(values: Json, key: str, *, least: int = 0) -> int:
    """Return the whole number under `key`; raise ValueError if it is none, or below `least`."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise refusal(key, value, f"a whole number of at least {least}")
    if value > LARGEST_SIZE:
        raise refusal(key, value, f"a whole number up to {LARGEST_SIZE}")
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


def positive(values: Json, key: str) -> float:
    """Return the number under `key`; raise ValueError unless it is finite and above 0."""
    found = number(values, key)
    if found <= 0:
        raise refusal(key, found, "a number above 0")
    return found


def flag(values: Json, key: str) -> bool:
    """Return the boolean under `key`, False if absent or null; raise ValueError for others."""
    value = values.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise refusal(key, value, "true or false")
    return value
