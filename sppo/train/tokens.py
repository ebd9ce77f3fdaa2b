"""Token data on disk: one flat stream of ids, memory-mapped, with the start of every document.

A directory holds three files:

* ``tokens.bin``: the ids of all documents one after another, little-endian uint16 or uint32;
* ``documents.npy``: int64 [num_documents + 1], where each document starts, then num_tokens;
* ``meta.json``: what :class:`TokenMeta` lists.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sppo.output_file import write_json

FORMAT_VERSION = 1
TOKENS_FILE = "tokens.bin"
DOCUMENTS_FILE = "documents.npy"
META_FILE = "meta.json"
TOKEN_DATA_FILES = frozenset({TOKENS_FILE, DOCUMENTS_FILE, META_FILE})
MAX_VOCAB_SIZE = 1 << 32

_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_HASH_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class TokenizerDescription:
    """What turned text into ids: enough to tell whether two data sets share a vocabulary."""

    name: str
    """``bytes``, ``ids``, or the tokenizer file as it was given."""
    end_of_document: int | None
    """Id appended to every document; None when nothing is."""
    sha256: str | None = None
    """Of the tokenizer file; None for the built-in ones."""
    vocabulary_sha256: str | None = None
    """Of its words by id (:mod:`sppo.train.model_tokenizer`); None for the built-in ones."""


@dataclass(frozen=True, slots=True)
class TokenMeta:
    """Contents of ``meta.json``."""

    format_version: int
    dtype: str
    vocab_size: int
    max_id: int
    """Largest id that occurs, which may be far below ``vocab_size - 1``."""
    num_tokens: int
    num_documents: int
    tokens_sha256: str
    """Of ``tokens.bin``."""
    tokenizer: TokenizerDescription

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """Type of one id in ``tokens.bin``."""
        return _DTYPES[self.dtype]


@dataclass(frozen=True, slots=True, eq=False)
class TokenData:
    """An open token directory. Arrays are mapped, so opening costs no memory whatever the size."""

    directory: Path
    meta: TokenMeta
    tokens: NDArray[np.unsignedinteger]
    """[num_tokens] ids, uint16 or uint32."""
    document_offsets: NDArray[np.int64]
    """[num_documents + 1] first token of each document, then num_tokens."""

    @property
    def num_tokens(self) -> int:
        """Length of the stream."""
        return self.meta.num_tokens

    @property
    def num_documents(self) -> int:
        """Documents in the stream; none is empty."""
        return self.meta.num_documents

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary the ids were drawn from."""
        return self.meta.vocab_size


def dtype_name(vocab_size: int) -> str:
    """The narrowest type that holds every id below ``vocab_size``."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def open_tokens(directory: Path | str) -> TokenData:
    """Map the tokens in ``directory`` after checking that its three files belong together.

    The contents of ``tokens.bin`` are not read; :func:`verify_tokens` does that.

    Raises:
        ValueError: no such directory, a file missing or unreadable, another format version,
            or sizes that disagree with ``meta.json``.
    """
    directory = Path(directory)
    try:
        _check_files(directory)
        meta = _read_meta(directory / META_FILE)
        tokens = _map_tokens(directory / TOKENS_FILE, meta)
        offsets = _map_offsets(directory / DOCUMENTS_FILE, meta)
    except OSError as error:
        raise ValueError(f"{directory}: cannot be read: {error.strerror or error}") from None
    return TokenData(directory=directory, meta=meta, tokens=tokens, document_offsets=offsets)


def _check_files(directory: Path) -> None:
    if not directory.is_dir():
        raise ValueError(
            f"{directory}: no such directory; token data is written by"
            f" `sppo data prepare --tokenizer bytes --out {directory} FILE...`"
        )
    missing = sorted(name for name in TOKEN_DATA_FILES if not (directory / name).is_file())
    if missing:
        raise ValueError(
            f"{directory}: {', '.join(missing)} missing; a token directory holds"
            f" {', '.join(sorted(TOKEN_DATA_FILES))}. Write it with `sppo data prepare`"
        )


def verify_tokens(data: TokenData) -> None:
    """Read everything once and compare it with the checksum and the index rules.

    Raises:
        ValueError: ``tokens.bin`` differs from what was written, or the index is not increasing.
    """
    digest = hashlib.sha256()
    block_tokens = _HASH_BLOCK_BYTES // data.tokens.itemsize
    for start in range(0, data.num_tokens, block_tokens):
        digest.update(data.tokens[start : start + block_tokens].data)
    if digest.hexdigest() != data.meta.tokens_sha256:
        raise ValueError(
            f"{data.directory / TOKENS_FILE}: sha256 {digest.hexdigest()[:12]}..., but"
            f" {META_FILE} records {data.meta.tokens_sha256[:12]}...: the file has changed since"
            " it was written; copy it again or prepare it again with --force"
        )
    if not bool(np.all(np.diff(data.document_offsets) > 0)):
        raise ValueError(
            f"{data.directory / DOCUMENTS_FILE}: document starts do not increase: the file has"
            " changed since it was written; prepare it again with --force"
        )


def check_fits(data: TokenData, *, vocab_size: int, length: int) -> None:
    """Check that a model can read these ids and that one training sequence exists.

    Args:
        data: Open token data.
        vocab_size: Rows of the model's token embedding.
        length: S, tokens of one training sequence.

    Raises:
        ValueError: every rule that is broken, one per line.
    """
    problems = []
    if data.meta.max_id >= vocab_size:
        problems.append(
            f"{data.directory}: ids up to {data.meta.max_id} (tokenizer"
            f" {data.meta.tokenizer.name}, vocabulary of {data.vocab_size}), but model.vocab_size"
            f" is {vocab_size}; an id must be below it. Set model.vocab_size to at least"
            f" {data.meta.max_id + 1}, or prepare the data with the model's tokenizer"
        )
    if data.num_tokens < length + 1:
        problems.append(
            f"{data.directory}: {data.num_tokens} tokens, but a sequence of"
            f" sequence.length {length} needs {length + 1} (inputs, and labels one token on)."
            f" {_shorter(data.num_tokens)}"
        )
    if problems:
        raise ValueError("\n".join(problems))


def _shorter(num_tokens: int) -> str:
    if num_tokens < 2:
        return "Prepare more data"
    return f"Set sequence.length to at most {num_tokens - 1}, or prepare more data"


def write_meta(path: Path, meta: TokenMeta) -> None:
    """Write ``meta.json``: indented, keys in the order of the class."""
    write_json(path, asdict(meta))


def _read_meta(path: Path) -> TokenMeta:
    fix = "prepare the data again with --force"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); {fix}") from None
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format_version {version!r}, but this program reads {FORMAT_VERSION};"
            f" use the version of sppo that wrote it, or {fix}"
        )
    try:
        return _parse_meta(raw)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}; {fix}") from None


def _parse_meta(raw: dict[str, Any]) -> TokenMeta:
    expected = {field.name for field in fields(TokenMeta)}
    if raw.keys() != expected:
        wrong = ", ".join(sorted(raw.keys() ^ expected))
        raise ValueError(f"keys missing or unknown: {wrong}")
    if raw["dtype"] not in _DTYPES:
        raise ValueError(f"dtype {raw['dtype']!r} is not one of {', '.join(_DTYPES)}")
    for name in ("vocab_size", "max_id", "num_tokens", "num_documents"):
        if type(raw[name]) is not int or raw[name] < 0:
            raise ValueError(f"{name} {raw[name]!r} is not a whole number of at least 0")
    return TokenMeta(**{**raw, "tokenizer": TokenizerDescription(**raw["tokenizer"])})


def _map_tokens(path: Path, meta: TokenMeta) -> NDArray[np.unsignedinteger]:
    expected_bytes = meta.num_tokens * meta.token_dtype.itemsize
    actual_bytes = path.stat().st_size
    if actual_bytes != expected_bytes or expected_bytes == 0:
        raise ValueError(
            f"{path}: {actual_bytes} bytes, but {META_FILE} says {meta.num_tokens} tokens of"
            f" {meta.dtype} = {expected_bytes} bytes (at least one token): the file was cut or"
            " replaced; copy it again or prepare it again with --force"
        )
    return np.memmap(path, dtype=meta.token_dtype, mode="r")


def _map_offsets(path: Path, meta: TokenMeta) -> NDArray[np.int64]:
    try:
        offsets = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise ValueError(f"{path}: {error}; prepare the data again with --force") from None
    whole = (
        offsets.dtype == np.int64
        and offsets.shape == (meta.num_documents + 1,)
        and int(offsets[0]) == 0
        and int(offsets[-1]) == meta.num_tokens
    )
    if not whole:
        raise ValueError(
            f"{path}: {offsets.dtype} {list(offsets.shape)}, but {META_FILE} says int64"
            f" [{meta.num_documents + 1}] from 0 to {meta.num_tokens}: the files are not of one"
            " data set; prepare it again with --force"
        )
    return offsets
