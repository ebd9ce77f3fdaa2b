"""Checks that token data has the vocabulary with which a model's weights were trained."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sppo.config.json_file import parse_json
from sppo.config.model import ModelConfig
from sppo.data.preparation.documents import reading
from sppo.data.tokens import META_FILE, TokenData, read_meta

TOKENIZER_FILE = "tokenizer.json"
_OTHER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
"""Tokenizer files of other formats, which only show that a model has a tokenizer."""


@dataclass(frozen=True, slots=True)
class VocabularyIdentity:
    """Size of a vocabulary, and SHA-256 of its tokens.

    Tokenizer files with the same vocabulary may differ: a chat model adds special tokens and a
    template, and a file that was saved again has other white space.
    """

    sha256: str
    """SHA-256 of the tokens by id, added tokens left out."""
    size: int
    """Largest id + 1, added tokens included."""


def vocabulary_identity(data: bytes) -> VocabularyIdentity | None:
    """Return the identity of the vocabulary in a ``tokenizer.json``; None if none can be read.

    Args:
        data: Contents of the file. The vocabulary is a mapping to ids (BPE, WordPiece, WordLevel)
            or a list of [word, score] (Unigram).
    """
    try:
        content = parse_json(data, source="tokenizer.json")
        words = _words(content["model"]["vocab"])
        added = [int(token["id"]) for token in content.get("added_tokens") or ()]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None
    if not words:
        return None
    digest = hashlib.sha256(json.dumps(words).encode()).hexdigest()
    return VocabularyIdentity(digest, max(words[-1][0], *added, 0) + 1)


def _words(vocabulary: Any) -> list[tuple[int, str]]:
    """Return (id, word) of all words of a vocabulary, sorted by id."""
    if isinstance(vocabulary, dict):
        return sorted((int(number), str(word)) for word, number in vocabulary.items())
    return [(number, str(word)) for number, (word, *_) in enumerate(vocabulary)]


def check_tokenizer(data: TokenData, model: ModelConfig) -> None:
    """Raise ValueError unless ``data`` has the vocabulary of the weights that a run starts from.

    Weights of ``model.from_hf`` were trained with the tokenizer in that directory. Nothing is
    checked for random weights, which can learn any vocabulary, for data of ready-made ids, whose
    vocabulary is unknown, and if no readable vocabulary is found.

    Raises:
        ValueError: The tokens are of another vocabulary.
    """
    if model.from_hf is None or data.meta.tokenizer.name == "ids":
        return
    directory = Path(model.from_hf)
    ours, path = data.meta.tokenizer, directory / TOKENIZER_FILE
    if not path.is_file():
        others = [name for name in _OTHER_FILES if (directory / name).is_file()]
        if others and ours.sha256 is None:
            raise _refusal(data, directory, theirs=str(directory / others[0]), size=None)
        return
    with reading(path):
        content = path.read_bytes()
    if ours.sha256 == hashlib.sha256(content).hexdigest():
        return
    theirs = vocabulary_identity(content)
    if theirs is None and ours.sha256 is not None:
        return
    if theirs is None or theirs.sha256 != ours.vocabulary_sha256:
        size = None if theirs is None else theirs.size
        raise _refusal(data, directory, theirs=str(path), size=size)


def check_same_vocabulary(held_out: TokenData, *, training: Path) -> None:
    """Raise ValueError unless held-out tokens have the vocabulary of the training tokens.

    Nothing is checked if either data set has ready-made ids, whose vocabulary is unknown.

    Args:
        held_out: Tokens to evaluate on.
        training: Directory of the training tokens; nothing is checked if it has none.

    Raises:
        ValueError: The tokens are of different vocabularies.
    """
    meta = training / META_FILE
    if not meta.is_file():
        return
    with reading(meta):
        theirs = read_meta(meta).tokenizer
    ours = held_out.meta.tokenizer
    if "ids" in (ours.name, theirs.name) or ours.sha256 == theirs.sha256:
        return
    if ours.vocabulary_sha256 is None or ours.vocabulary_sha256 != theirs.vocabulary_sha256:
        raise ValueError(
            f"data.eval_tokens {held_out.directory} are tokens of tokenizer {ours.name}, and the "
            f"run is trained on those of {theirs.name} in {training}: prepare the "
            "held-out text again, with the tokenizer of data.tokens"
        )


def _refusal(data: TokenData, directory: Path, *, theirs: str, size: int | None) -> ValueError:
    ours = data.meta.tokenizer
    size_text = "" if size is None else f" (vocabulary of {size})"
    return ValueError(
        f"{data.directory}: tokens of tokenizer {ours.name} (vocabulary of {data.vocab_size}), but "
        f"the weights of model.from_hf={directory} know the ids of {theirs}{size_text}. Prepare "
        f"the data with that: sppo data prepare --tokenizer {directory / TOKENIZER_FILE} --out DIR "
        "FILE...; or start from random weights, with model.preset in place of from_hf. If the "
        f"weights were made for these tokens, put their tokenizer.json into {directory}"
    )
