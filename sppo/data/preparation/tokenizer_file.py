"""Tokenizers of the ``tokenizers`` library: loading, end-of-text token, and vocabulary."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sppo.config.json_file import parse_json, read_json
from sppo.data.chat.marked_text import MarkedText
from sppo.data.preparation.opening import reading
from sppo.data.preparation.tokenizers import EncodedText, EndOfDocument, end_id
from sppo.data.tokens import TokenizerDescription
from sppo.quoting import one_line

TOKENIZER_FILE = "tokenizer.json"
_SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json")
END_OF_TEXT_TOKENS = (
    "<|end_of_text|>",  # Llama 3
    "<|endoftext|>",  # GPT-2, Qwen, Phi
    "</s>",  # Llama 2, Mistral
    "<eos>",  # Gemma
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
    "[EOS]",
)
"""End-of-text tokens of model families. They have priority over the ``eos_token`` of a model,
because that of a chat model ends a turn (``<|im_end|>``, ``<|eot_id|>``)."""


@dataclass(frozen=True, slots=True, eq=False)
class FileTokenizer:
    """Tokenizer loaded from a file; adds no special tokens, and does not truncate or pad."""

    backend: Any
    """Object of class ``tokenizers.Tokenizer``."""
    _: KW_ONLY
    vocab_size: int
    description: TokenizerDescription
    files: Mapping[str, bytes]
    """Contents of the files of the tokenizer by name, which are kept with its tokens."""

    def encode_texts(self, texts: Sequence[MarkedText]) -> list[EncodedText]:
        """Return the ids of texts, with what of them counts in the loss."""
        strings = [text.text for text in texts]
        if all(text.trained is None for text in texts):
            # The "fast" form does not compute character offsets, which are not used here.
            encodings = self.backend.encode_batch_fast(strings, add_special_tokens=False)
            return [(np.asarray(encoding.ids, dtype=np.uint32), None) for encoding in encodings]
        encodings = self.backend.encode_batch(strings, add_special_tokens=False)
        return [
            (np.asarray(encoding.ids, dtype=np.uint32), text.counting(_offsets(encoding)))
            for text, encoding in zip(texts, encodings, strict=True)
        ]


def _offsets(encoding: Any) -> NDArray[np.int64]:
    """Return the span of characters of each token, [n, 2]; asarray takes three times as long."""
    spans = encoding.offsets  # made anew whenever it is read
    numbers = np.fromiter(chain.from_iterable(spans), dtype=np.int64, count=2 * len(spans))
    return numbers.reshape(-1, 2)


def load_tokenizer_file(name: str, *, end_of_document: EndOfDocument) -> FileTokenizer:
    """Load a ``tokenizer.json``.

    With ``auto`` the end-of-text token is the first of :data:`END_OF_TEXT_TOKENS` that is an added
    token; otherwise ``eos_token`` of the ``tokenizer_config.json`` beside the file; otherwise none.

    Args:
        name: Path of the file, or of a directory that holds it.
        end_of_document: Id appended to every document; see :data:`EndOfDocument`.

    Raises:
        ValueError: There is no such file, the file is not a tokenizer, the library is not
            installed, or the id is out of range.
    """
    path = _tokenizer_path(name)
    with reading(path):
        data = path.read_bytes()
    backend = _load(data, path)
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise ValueError(f"{path}: its vocabulary is empty; give a trained tokenizer")
    # Ids may have gaps, so the count of tokens is not enough.
    vocab_size = max(vocabulary.values()) + 1
    own = _end_of_text(backend, vocabulary=vocabulary, folder=path.parent)
    end = end_id(end_of_document, own=own, vocab_size=vocab_size)
    identity = vocabulary_identity(data)
    description = TokenizerDescription(
        name=name,
        end_of_document=end,
        sha256=hashlib.sha256(data).hexdigest(),
        vocabulary_sha256=None if identity is None else identity.sha256,
    )
    files = {TOKENIZER_FILE: data, **read_files(path.parent, _SETTINGS_FILES)}
    return FileTokenizer(backend, vocab_size=vocab_size, description=description, files=files)


def read_files(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return the contents of those of some files that are in a directory, by name.

    Raises:
        ValueError: One cannot be read.
    """
    files = {}
    for path in (folder / name for name in names):
        with reading(path):
            if path.is_file():
                files[path.name] = path.read_bytes()
    return files


def _tokenizer_path(name: str) -> Path:
    path = Path(name)
    if path.is_dir():
        if (path / TOKENIZER_FILE).is_file():
            return path / TOKENIZER_FILE
        raise ValueError(
            f"--tokenizer {name}: the directory holds no {TOKENIZER_FILE}; give one that does"
            " (save the model's tokenizer with transformers' fast tokenizer to get it)"
        )
    if not path.exists():
        raise ValueError(
            f"--tokenizer {name}: neither 'bytes' nor 'ids', and no such file or directory;"
            f" give one of those tokens, or the path of a {TOKENIZER_FILE}"
        )
    return path


def _load(data: bytes, path: Path) -> Any:
    try:
        from tokenizers import Tokenizer, processors
    except ImportError:
        raise ValueError(
            f"--tokenizer {path}: the tokenizers library is not installed;"
            " run `pip install 'sppo[hf]'`, or use --tokenizer bytes"
        ) from None
    # The library raises plain Exception for files that it cannot parse.
    try:
        backend = Tokenizer.from_buffer(data)
    except Exception as error:
        raise ValueError(
            f"{path}: not a tokenizer of the tokenizers library ({one_line(error)}); give its"
            f" {TOKENIZER_FILE}"
        ) from None
    backend.no_truncation()
    backend.no_padding()
    # Its own processor adds special tokens, which are not asked for, and would take spaces out of
    # the offsets of tokens.
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


def _end_of_text(backend: Any, *, vocabulary: dict[str, int], folder: Path) -> int | None:
    # Added tokens only: "</s>" may be an ordinary token of a vocabulary learnt from HTML.
    decoder = backend.get_added_tokens_decoder()
    added: dict[str, int] = {token.content: number for number, token in decoder.items()}
    for token in END_OF_TEXT_TOKENS:
        if token in added:
            return added[token]
    return vocabulary.get(_configured_end(folder / "tokenizer_config.json"))


def _configured_end(path: Path) -> str:
    """Return ``eos_token`` of a ``tokenizer_config.json``; "" if it cannot be read."""
    try:
        token = read_json(path).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return ""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


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
