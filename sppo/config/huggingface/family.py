"""A family of Hugging Face models: a record that is read both ways.

A family holds a model if and only if the model is the same after writing and reading.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sppo.config.huggingface.settings import (
    Json,
    Key,
    Setting,
    require,
    score_scale,
    shortest_pattern,
)
from sppo.config.huggingface.tensor_names import TensorNames
from sppo.config.model import NOT_COMPUTED, ModelConfig
from sppo.quoting import quoted

Only = tuple[tuple[object, ...], str]
"""Values that a key may have beside null, and words for what is supported."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HfFamily:
    """Record of a family."""

    architecture: str
    """Class of transformers."""
    settings: tuple[Setting, ...]
    """Keys of a ``config.json`` and the model fields that they determine."""
    defaults: Json
    """Values of keys that a ``config.json`` leaves out."""
    tensors: TensorNames
    """Names and layouts of the tensors."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Model fields that are equal in all models of the family. Fields that neither a setting nor
    this mapping names are those of a model that leaves them out."""
    refused: Mapping[str, Only]
    """Keys that change the function, by name: null, or one of the values that do not."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Keys by their other names."""
    no_dropout: tuple[str, ...] = ("attention_dropout",)
    """Keys that are written as 0, since models were trained without dropout."""
    no_layers: tuple[str, ...] = ()
    """Keys of layers that predict further tokens: written as 0, since their tensors are skipped."""
    skipped: tuple[str, ...] = ()
    """Keys of parts of a model whose tensors are skipped."""
    nested_in: str = ""
    """``model_type`` of files that hold this family's ``config.json`` as ``text_config``."""

    def read(self, config: Json) -> dict[str, Any]:
        """Return the model fields in a parsed ``config.json``.

        Raises:
            ValueError: A value is refused, missing or of the wrong type.
        """
        faults = [
            f"{key} {quoted(config[key])} (supported: {supported})"
            for key, (allowed, supported) in self.refused.items()
            if config.get(key) is not None and config[key] not in allowed
        ]
        if faults:
            raise ValueError("config.json has " + "; ".join(faults))
        values = self._with_own_names(config)
        keys = [setting for setting in self.settings if isinstance(setting, Key)]
        require(values, [key.key for key in keys if key.is_required_size])
        flat = dict(self.fixed)
        for setting in self.settings:
            flat |= setting.read(values)
        fields: dict[str, Any] = {}
        for name, value in flat.items():
            section, _, own = name.rpartition(".")
            (fields.setdefault(section, {}) if section else fields)[own] = value
        return fields

    def _with_own_names(self, config: Json) -> Json:
        """Return the settings by the family's own names, with its defaults for those absent.

        If a key and an alias of it are both there, the key counts unless it is null.
        """
        values = {self.aliases.get(key, key): value for key, value in config.items()}
        own = {key: config[key] for key in self.aliases.values() if config.get(key) is not None}
        return {**self.defaults, **values, **own}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of any model; :meth:`misfits` says whether they describe it."""
        config: dict[str, Any] = dict.fromkeys(self.no_dropout, 0.0)
        config |= dict.fromkeys(self.no_layers, 0)
        for setting in self.settings:
            config |= setting.write(model)
        return config

    @functools.lru_cache(maxsize=256)  # noqa: B019 - records live as long as the program
    def misfits(self, model: ModelConfig) -> tuple[str, ...]:
        """Return the reasons why the family does not compute exactly `model`."""
        try:
            held = ModelConfig.model_validate(self.read(self.write(model)))
        except ValueError as error:
            return (str(error),)
        return tuple(_differences(model, held))


def _differences(model: ModelConfig, held: ModelConfig) -> Iterator[str]:
    """Yield the fields in which models that compute different functions differ."""
    ours, theirs = _function(model), _function(held)
    for name, value in ours.items():
        needed = theirs.get(name, value)
        same = value == needed
        if isinstance(value, float) and isinstance(needed, float):
            same = math.isclose(value, needed, rel_tol=1e-12)
        if not same:
            yield f"{name} is {_word(value)}, needs {_word(needed)}"


def _function(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that determine the function of a model, equal for equal functions."""
    types = [model.layer_type(layer) for layer in range(model.num_layers)]
    unused = {"rope_theta", "rotary_fraction", "rotary_layers"}
    if model.position == "rotary":
        unused = {"max_positions"}
    if all(own.routed for own in types):
        unused |= {"mlp_size", "mlp_bias"}
    unused |= NOT_COMPUTED
    fields = {name: getattr(model, name) for name in ModelConfig.model_fields if name not in unused}
    fields["attention_scale"] = score_scale(model)
    fields["layer_types"] = shortest_pattern(
        ["linear" if own.linear else "full" if own.window is None else "sliding" for own in types]
    )
    if model.position == "rotary":
        rotated = [own.rotation is not None for own in types if not own.linear]
        fields["rotary_layers"] = shortest_pattern(rotated)
    if not model.has_windows:
        fields["sliding_window"] = None
    alike = model.rope_scaling is None and model.sliding_rope_theta == model.rope_theta
    if alike or not model.has_windows:
        fields["sliding_rope_theta"] = None
    for section in ("experts", "linear_attention"):
        if fields[section] is not None:
            fields |= {f"{section}.{name}": value for name, value in fields[section]}
            fields[section] = "not null"
    return fields


def _word(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else quoted(value).replace("'", "")
