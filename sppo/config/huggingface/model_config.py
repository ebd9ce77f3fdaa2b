"""Conversion of a Hugging Face ``config.json`` to model fields and back.

Reads neither weights nor network. Dropout is accepted and not applied: SPPO trains without dropout.
Every other setting that changes the function of a model and is not supported is refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sppo.config.huggingface.families import FAMILIES, REFUSED_FAMILIES
from sppo.config.huggingface.settings import Json, refusal
from sppo.config.json_file import read_json
from sppo.config.model import Family, ModelConfig
from sppo.quoting import quoted

_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
_NESTED, _TIED = "text_config", "tie_word_embeddings"


def check_directory(directory: Path) -> None:
    """Raise ValueError if there is no such directory of a model; the message says how to get it."""
    if not directory.is_dir():
        raise ValueError(
            f"{directory} is not a directory, and nothing is downloaded: hf download OWNER/NAME "
            f"--local-dir {directory}; to plan, its config.json is enough, or a model.preset"
        )


def read_config(directory: Path) -> dict[str, Any]:
    """Return the mapping in ``directory/config.json``.

    Raises:
        ValueError: The directory or file does not exist, cannot be read, or is not a JSON mapping.
    """
    directory = Path(directory)
    check_directory(directory)
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
    config = _text_config(config)
    name = config.get("model_type")
    for family, record in FAMILIES.items():
        if name == family:
            return {"family": family, **record.read(config)}
    if isinstance(name, str) and name in REFUSED_FAMILIES:
        raise refusal("model_type", name, REFUSED_FAMILIES[name])
    raise refusal("model_type", name, ", ".join(FAMILIES))


def _text_config(config: Json) -> Json:
    """Return the settings of the language model in those of a model that also sees.

    Whether embeddings are tied is a setting of the whole model, unless that leaves it out.
    """
    for name, family in FAMILIES.items():
        if family.nested_in and config.get("model_type") == family.nested_in:
            text = config.get(_NESTED)
            if not isinstance(text, dict):
                raise refusal(_NESTED, text, "a mapping of settings")
            tied = {key: value for key, value in config.items() if key == _TIED}
            return {**config, **text, **tied, "model_type": name}
    return config


def ignored_settings(config: Json) -> tuple[str, ...]:
    """Return the settings in a ``config.json`` that training ignores, as ``key value`` texts."""
    keys: set[str] = set()
    for family in FAMILIES.values():
        keys |= {*family.no_dropout, *family.no_layers, *family.skipped}
    values = _text_config(config)
    return tuple(f"{key} {quoted(values[key])}" for key in sorted(keys) if values.get(key))


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
    return {
        "architectures": [FAMILIES[name].architecture],
        "model_type": name,
        # The older spelling of `dtype`, which every version reads.
        "torch_dtype": _DTYPES[dtype],
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **FAMILIES[name].write(model),
    }


def hf_family(model: ModelConfig) -> Family:
    """Return the family under which ``hf_config`` writes `model`.

    Raises:
        ValueError: No family, or not ``model.family``, computes exactly this model.
    """
    candidates = tuple(FAMILIES) if model.family is None else (model.family,)
    lines = []
    for name in candidates:
        misfits = FAMILIES[name].misfits(model)
        if not misfits:
            return name
        lines.append(f"  {name}: {'; '.join(misfits)}")
    head = "no Hugging Face family computes exactly this model:"
    if model.family is not None:
        head = f"{model.family} does not compute this model; use another family or null:"
    raise ValueError("\n".join([head, *lines]))
