"""Conversion of rotary settings from and to a ``config.json``.

Two spellings exist: ``rope_theta`` beside a ``rope_scaling`` mapping (all files published until
2025, still read by every program), and one ``rope_parameters`` mapping with both. Either is read;
the first is written.
"""

from __future__ import annotations

import math
from typing import Any

from sppo.config.huggingface.settings import Json, flag, integer, number, refusal, require
from sppo.config.model import ModelConfig, RopeScaling

_SUPPORTED = "default, linear, llama3, yarn"
_DEFAULT_THETA = 10_000.0
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
}
"""Keys of each rope type besides ``factor``; the names are the same in SPPO and in
``config.json``."""


class Rope:
    """Keys of rotary positions, for ``rope_theta`` and ``rope_scaling`` of a model."""

    def read(self, config: Json) -> dict[str, Any]:
        """Return the model fields; raise ValueError for a type or variant not supported."""
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(rope, dict):
            raise refusal("rope_scaling", rope, "a mapping or null")
        nested = [key for key, value in rope.items() if isinstance(value, dict)]
        if nested:
            raise refusal("rope_parameters for", nested, "one rotary setting for all layers")
        _check_whole_head(config, rope)
        theta = {"rope_theta": _DEFAULT_THETA, **_given(config), **_given(rope)}
        kind = rope.get("rope_type", rope.get("type", "default"))
        scaling = None if kind == "default" else _read_scaling(kind, rope, config)
        return {"rope_theta": number(theta, "rope_theta"), "rope_scaling": scaling}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys."""
        scaling = model.rope_scaling
        return {
            "rope_theta": model.rope_theta,
            "rope_scaling": None if scaling is None else _write_scaling(scaling),
        }


def _given(values: Json) -> Json:
    """Return the values that are not null."""
    return {key: value for key, value in values.items() if value is not None}


def _check_whole_head(config: Json, rope: Json) -> None:
    for where in (config, rope):
        fraction = where.get("partial_rotary_factor")
        if fraction is not None and fraction != 1:
            raise refusal("partial_rotary_factor", fraction, "1.0, the whole head is rotated")


def _read_scaling(kind: object, rope: Json, config: Json) -> dict[str, Any]:
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise refusal("rope_type", kind, _SUPPORTED)
    require(rope, ["factor"])
    scaling: dict[str, Any] = {"type": kind, "factor": number(rope, "factor")}
    if kind != "linear":
        # The key beside the mapping takes precedence over the one in it, as in transformers.
        original = {**_given(rope), **_given(config)}
        beside = "original_max_position_embeddings"
        key = beside if beside in original else "max_position_embeddings"
        scaling["original_max_positions"] = integer(original, key)
    if kind == "llama3":
        require(rope, ROPE_KEYS[kind])
    scaling |= {
        key: flag(rope, key) if key == "truncate" else number(rope, key)
        for key in ROPE_KEYS[kind]
        if rope.get(key) is not None
    }
    if kind == "yarn":
        _read_yarn_variants(scaling, rope)
    return scaling


def _read_yarn_variants(scaling: dict[str, Any], rope: Json) -> None:
    """Replace ``mscale / mscale_all_dim`` by the attention factor that they define."""
    if "attention_factor" in scaling or not (rope.get("mscale") and rope.get("mscale_all_dim")):
        return
    log_factor = 0.1 * math.log(max(scaling["factor"], 1.0))
    over, under = (1 + log_factor * number(rope, key) for key in ("mscale", "mscale_all_dim"))
    scaling["attention_factor"] = over / under


def _write_scaling(scaling: RopeScaling) -> dict[str, Any]:
    mapping: dict[str, Any] = {"rope_type": scaling.type, "factor": scaling.factor}
    if scaling.type != "linear":
        mapping["original_max_position_embeddings"] = scaling.original_max_positions
    for key in ROPE_KEYS[scaling.type]:
        value = getattr(scaling, key)
        if value is not None and value is not True:  # truncate is true where it is left out
            mapping[key] = value
    return mapping
