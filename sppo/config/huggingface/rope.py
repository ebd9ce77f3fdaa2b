"""Conversion of rotary settings from and to a ``config.json``.

Two spellings exist: ``rope_theta`` beside a ``rope_scaling`` mapping (all files published until
2025, still read by every program), and one ``rope_parameters`` mapping with both, which may hold
one mapping for each type of layers. Either is read; the first is written, and the second beside it
by families that need it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sppo.config.huggingface.settings import Json, flag, integer, number, refusal, require
from sppo.config.model import ModelConfig, RopeScaling

ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
}
"""Keys of each rope type besides ``factor``; the names are the same in SPPO and in
``config.json``."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_FRACTION = "partial_rotary_factor"
_BY_LENGTH = ("longrope", "su", "dynamic")
_BY_LENGTH_HELP = (
    "; frequencies that depend on the length of the sequence are not: remove rope_scaling, and "
    "train within the original context"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Keys of rotary positions: base, stretching, share of a head, and those of window layers."""

    theta: float = 10_000.0
    """Base of the wavelengths if no key names it."""
    types: tuple[str, ...] = tuple(ROPE_KEYS)
    """Types of stretching that the family knows."""
    fraction: float | None = None
    """Share of a head that is rotated if no key names it; None if it is always the whole head."""
    sliding_theta: float | None = None
    """Base in layers with a window, if no key names it; None if all layers rotate alike."""
    sliding_key: str = ""
    """Older key of that base."""
    unnamed: Json | None = None
    """Mapping that counts where both mappings are absent or null."""

    def read(self, config: Json) -> dict[str, Any]:
        """Return the model fields; raise ValueError for a type or variant not supported."""
        rope = config.get("rope_scaling") or config.get("rope_parameters") or self.unnamed or {}
        if not isinstance(rope, dict):
            raise refusal("rope_scaling", rope, "a mapping or null")
        nested = config.get("rope_parameters") or {}
        if self.sliding_theta is not None and isinstance(nested.get(_FULL), dict):
            rope = {**nested, **nested[_FULL], **(config.get("rope_scaling") or {})}
            sliding = nested.get(_SLIDING) or {}
        else:
            sliding = {}
        mappings = [key for key, value in rope.items() if isinstance(value, dict)]
        if mappings and self.sliding_theta is None:
            raise refusal("rope_parameters for", mappings, "one rotary setting for all layers")
        fields = self._of_full(config, rope)
        if self.sliding_theta is not None:
            fields |= self._of_sliding(config, sliding, fields)
        return fields

    def _of_full(self, config: Json, rope: Json) -> dict[str, Any]:
        """Return the fields for layers without a window."""
        beside = {**_given(config), **_given(rope)}
        fraction = beside.get(_FRACTION, self.fraction)
        if fraction is not None and self.fraction is None and fraction != 1:
            raise refusal(_FRACTION, fraction, "1.0, the whole head is rotated")
        theta = {"rope_theta": self.theta, **beside}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default" and kind not in self.types:
            help_text = _BY_LENGTH_HELP if kind in _BY_LENGTH else ""
            raise refusal("rope_type", kind, ", ".join(["default", *self.types]) + help_text)
        return {
            "rope_theta": number(theta, "rope_theta"),
            "rope_scaling": None if kind == "default" else _read_scaling(kind, rope, config),
            "rotary_fraction": 1.0
            if fraction is None
            else number({_FRACTION: fraction}, _FRACTION),
        }

    def _of_sliding(self, config: Json, sliding: Json, full: Json) -> dict[str, Any]:
        """Return the base of layers with a window, which are not stretched."""
        kind = sliding.get("rope_type", sliding.get("type", "default"))
        if kind != "default":
            raise refusal(f"rope_type of {_SLIDING}", kind, "default")
        thetas = [sliding.get("rope_theta"), config.get(self.sliding_key), self.sliding_theta]
        theta = next(theta for theta in thetas if theta is not None)
        alike = theta == full["rope_theta"] and full["rope_scaling"] is None
        found = number({f"rope_theta of {_SLIDING}": theta}, f"rope_theta of {_SLIDING}")
        return {"sliding_rope_theta": None if alike else found}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys."""
        scaling = None if model.rope_scaling is None else _write_scaling(model.rope_scaling)
        keys: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_scaling": scaling}
        if self.fraction is not None:
            keys[_FRACTION] = model.rotary_fraction
        full = {"rope_type": "default", **(scaling or {}), "rope_theta": model.rope_theta}
        if self.sliding_theta is not None:
            theta = model.sliding_rope_theta or model.rope_theta
            sliding = {"rope_type": "default", "rope_theta": theta}
            keys["rope_parameters"] = {_FULL: full, _SLIDING: sliding}
            if self.sliding_key:
                keys[self.sliding_key] = theta
        elif self.unnamed is not None:
            keys["rope_parameters"] = full
        return keys


def _given(values: Json) -> Json:
    """Return the values that are not null."""
    return {key: value for key, value in values.items() if value is not None}


def _read_scaling(kind: str, rope: Json, config: Json) -> dict[str, Any]:
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
