"""Conversion of a Hugging Face ``config.json`` to model fields and back.

Reads neither weights nor network. Dropout is accepted and not applied: SPPO trains without dropout.
Every other setting that changes the function of a model and is not supported is refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from sppo.config.huggingface.families import FAMILIES, HfFamily
from sppo.config.huggingface.settings import Json, Key, refusal, require
from sppo.config.json_file import read_json
from sppo.config.model import Family, ModelConfig
from sppo.quoting import quoted

_OFF: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("quantization_config", (), "null, plain weights"),
    ("num_experts", (0,), "null, dense models"),
    ("num_local_experts", (0,), "null, dense models"),
    ("n_routed_experts", (0,), "null, dense models"),
    ("is_encoder_decoder", (False,), "false, decoder-only models"),
    ("add_cross_attention", (False,), "false, decoder-only models"),
    ("is_causal", (True,), "true, causal attention"),
    ("pruned_heads", ({}, []), "null, all heads"),
    ("scale_attn_weights", (True,), "true, scores divided by the root of the head size"),
    ("scale_attn_by_inverse_layer_idx", (False,), "false"),
)
"""Keys that must be absent, null, or have one of the given values; the text names what is
supported."""

_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


def read_config(directory: Path) -> dict[str, Any]:
    """Return the mapping in ``directory/config.json``.

    Raises:
        ValueError: The directory or file does not exist, cannot be read, or is not a JSON mapping.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(
            f"{directory} is not a directory; name a local one in the Hugging Face layout, "
            "nothing is downloaded"
        )
    path = directory / "config.json"
    try:
        config = read_json(path)
    except FileNotFoundError:
        raise ValueError(f"{directory} holds no config.json") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds {type(config).__name__}, not a mapping of settings")
    return config


def model_fields(config: Json) -> dict[str, Any]:
    """Return the fields of :class:`sppo.config.model.ModelConfig` in a parsed ``config.json``.

    Raises:
        ValueError: The family or a feature is not supported.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise refusal("model_type", name, ", ".join(FAMILIES))
    faults = [
        f"{key} {quoted(config[key])} (supported: {supported})"
        for key, allowed, supported in _OFF
        if config.get(key) is not None and config[key] not in allowed
    ]
    if faults:
        raise ValueError("config.json has " + "; ".join(faults))
    family = FAMILIES[cast(Family, name)]
    values = _with_own_names(config, family)
    keys = [setting for setting in family.settings if isinstance(setting, Key)]
    require(values, [key.key for key in keys if key.is_required_size])
    fields: dict[str, Any] = {"family": name, **family.fixed}
    for setting in family.settings:
        fields |= setting.read(values)
    return fields


def _with_own_names(config: Json, family: HfFamily) -> Json:
    """Return the settings by the family's own names of keys, with its defaults for those absent.

    If a key and an alias of it are both there, the key counts unless it is null.
    """
    values = {family.aliases.get(key, key): value for key, value in config.items()}
    own = {key: config[key] for key in family.aliases.values() if config.get(key) is not None}
    return {**family.defaults, **values, **own}


def ignored_settings(config: Json) -> tuple[str, ...]:
    """Return the settings in a ``config.json`` that training ignores, as ``key value`` texts."""
    dropouts = sorted({key for family in FAMILIES.values() for key in family.no_dropout})
    return tuple(f"{key} {quoted(config[key])}" for key in dropouts if config.get(key))


def hf_config(model: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """Return the ``config.json`` of `model`.

    Special token ids are null, because a model shape does not know its tokenizer. Without these
    keys each family would assume default ids.

    Args:
        model: Shape of the model; ``model.family`` is used if set, else the first family that
            matches.
        dtype: Type of the weights: ``fp32``, ``bf16``, ``fp16`` or ``fp64``.

    Raises:
        ValueError: No family, or not the requested one, computes exactly this model.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    name = hf_family(model)
    family = FAMILIES[name]
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": name,
        # The older spelling of `dtype`, which every version reads.
        "torch_dtype": _DTYPES[dtype],
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **dict.fromkeys(family.no_dropout, 0.0),
    }
    for setting in family.settings:
        config |= setting.write(model)
    return config


def hf_family(model: ModelConfig) -> Family:
    """Return the family under which ``hf_config`` writes `model`.

    Raises:
        ValueError: No family, or not ``model.family``, computes exactly this model.
    """
    candidates = tuple(FAMILIES) if model.family is None else (model.family,)
    misfits = {name: list(FAMILIES[name].misfits(model)) for name in candidates}
    for name, reasons in misfits.items():
        if not reasons:
            return name
    lines = [f"  {name}: {'; '.join(reasons)}" for name, reasons in misfits.items()]
    head = "no Hugging Face family computes exactly this model:"
    if model.family is not None:
        head = f"{model.family} does not compute this model; use another family or null:"
    raise ValueError("\n".join([head, *lines]))
