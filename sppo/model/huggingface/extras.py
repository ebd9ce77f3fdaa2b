"""Extras beside a model's weights in a Hugging Face directory, which text generation needs.

They are the tokenizer with its chat template, generation_config.json and ids of special tokens, one
of which ends a text: a program that finds no such id generates for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sppo.config.json_file import read_json
from sppo.quoting import quoted

_END = "eos_token_id"
_TOKEN_IDS = ("bos_token_id", _END, "pad_token_id")
_CONFIG, GENERATION_FILE = "config.json", "generation_config.json"
_TOKENIZER, _TEMPLATE = "tokenizer", "chat template"
BESIDE_ADAPTER = (_TOKENIZER, _TEMPLATE)
"""Names of the extras that belong beside an adapter; the others are those of its base."""
_TOKENIZER_SETTINGS = "tokenizer_config.json"
_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
)
_COPIED = (
    *_VOCABULARIES,
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    GENERATION_FILE,
)


@dataclass(frozen=True, slots=True)
class Extras:
    """Files to copy beside the weights of a model, and values for its config.json."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    """Contents of the files of the tokenizer, chat template and generation_config.json by name."""
    token_ids: Mapping[str, Any] = field(default_factory=dict)
    """Ids of special tokens by key, e.g. ``eos_token_id``; a list if several do the same."""
    missing: tuple[str, ...] = (_TOKENIZER, _TEMPLATE, GENERATION_FILE, *_TOKEN_IDS)
    """Names of what is not there."""
    endless: str = _CONFIG
    """The file that should name the token that ends a text and does not; "" if it does."""


def read_extras(directory: Path) -> Extras:
    """Return what stands in ``directory``; each of the files may be absent.

    Ids that config.json leaves out are taken from generation_config.json. If that file is present,
    transformers takes the end of a text from it alone.

    Raises:
        ValueError: There is no such directory, or a JSON file in it is no mapping.
        OSError: A file cannot be read.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory")
    found = {path.name: path for name in _COPIED for path in directory.glob(name) if path.is_file()}
    generation = _mapping(directory / GENERATION_FILE)
    stated = generation | {k: v for k, v in _mapping(directory / _CONFIG).items() if v is not None}
    token_ids = {key: stated[key] for key in _TOKEN_IDS if stated.get(key) is not None}
    templates = [name for name in found if name.startswith("chat_template.")]
    has_template = templates or "chat_template" in _mapping(directory / _TOKENIZER_SETTINGS)
    there = {
        _TOKENIZER: not found.keys().isdisjoint(_VOCABULARIES),
        _TEMPLATE: has_template,
        GENERATION_FILE: GENERATION_FILE in found,
        **{key: key in token_ids for key in _TOKEN_IDS},
    }
    decides, ids = (
        (GENERATION_FILE, generation) if GENERATION_FILE in found else (_CONFIG, token_ids)
    )
    return Extras(
        files={name: found[name].read_bytes() for name in sorted(found)},
        token_ids=token_ids,
        missing=tuple(name for name, is_there in there.items() if not is_there),
        endless="" if ids.get(_END) is not None else decides,
    )


def _mapping(path: Path) -> dict[str, Any]:
    """Return the settings in a JSON file; none if there is no such file."""
    if not path.is_file():
        return {}
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {quoted(value)}, not a mapping of settings")
    return value
