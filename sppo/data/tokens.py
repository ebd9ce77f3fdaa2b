"""Token data on disk: one flat stream of ids, memory-mapped, with the start of every document.

A directory holds three files, and a fourth if some predictions must not count in the loss; beside
them stand the files of the tokenizer, and the chat template, if they are known:

* ``tokens.bin``: the ids of all documents one after another, little-endian uint16 or uint32;
* ``documents.npy``: int64 [num_documents + 1], the start of each document, then num_tokens;
* ``meta.json``: the fields of :class:`TokenMeta`;
* ``loss_mask.bin``: one byte for each token, 0 where predicting that token does not count in the
  loss. Without the file all tokens count.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from sppo.array_file import map_array, require_whole
from sppo.config.json_file import JsonError, first_problem, read_json
from sppo.config.longest_document import DOCUMENTS_FILE as DOCUMENTS_FILE
from sppo.config.problems import nearest
from sppo.quoting import one_line, quoted
from sppo.units import LARGEST_SIZE

FORMAT_VERSION = 2
_READ_VERSIONS = (1, 2)
TOKENS_FILE = "tokens.bin"
META_FILE = "meta.json"
LOSS_MASK_FILE = "loss_mask.bin"
CELLS_FILE = "cells.json"
"""Of needle data alone: length and depth of each document (:mod:`sppo.data.needle.cells`)."""
TOKEN_DATA_FILES = frozenset({TOKENS_FILE, DOCUMENTS_FILE, META_FILE})
"""Files of every token directory."""
TOKENIZER_FILES = frozenset(
    {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"}
)
FURTHER_FILES = TOKENIZER_FILES | {LOSS_MASK_FILE, CELLS_FILE}
"""Files of some token directories."""
MAX_VOCAB_SIZE = 1 << 32

_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_HASH_BLOCK_BYTES = 8 << 20
_STARTS_BLOCK = 1 << 20
_PREPARE_HINT = "prepare the data again with --force"
_CHANGED = (
    "the file has changed since it was written; copy it again or prepare it again with --force"
)

_Count = Annotated[int, Field(ge=0, le=LARGEST_SIZE)]


@dataclass(frozen=True, slots=True)
class TokenizerDescription:
    """Tokenizer of token data: enough to tell whether two data sets share a vocabulary."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: str
    """``bytes``, ``ids``, or the path of the tokenizer file as the user gave it."""
    end_of_document: _Count | None
    """Id appended to every document; None if none is appended."""
    sha256: str | None = None
    """SHA-256 of the tokenizer file; None for the built-in tokenizers."""
    vocabulary_sha256: str | None = None
    """Checksum of the vocabulary by id (:mod:`sppo.data.preparation.tokenizer_file`); None for the
    built-in tokenizers, or if the file has no readable vocabulary."""


@dataclass(frozen=True, slots=True)
class TokenMeta:
    """Contents of ``meta.json``."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    format_version: int
    dtype: Literal["uint16", "uint32"]
    vocab_size: _Count
    max_id: _Count
    """Largest id that occurs, which may be far below ``vocab_size - 1``."""
    num_tokens: _Count
    num_documents: _Count
    tokens_sha256: str
    """SHA-256 of ``tokens.bin``."""
    tokenizer: TokenizerDescription
    documents_sha256: str | None = None
    """Checksum of the starts in ``documents.npy``; None in data written without one."""
    loss_mask_sha256: str | None = None
    """SHA-256 of ``loss_mask.bin``; None without a loss mask."""
    format: str | None = None
    """Format of the rows (:mod:`sppo.data.preparation.columns`); None in data that tell none."""
    train_on: str | None = None
    """Part of each document that is trained on: ``all``, ``completion``, ``assistant`` or ``last``;
    None if its loss mask was given, or in data that tell none."""
    mask_method: str | None = None
    """How a chat template tells the text of the assistant; None for other documents."""
    chat_template_sha256: str | None = None
    """SHA-256 of ``chat_template.jinja``; None if documents are no chats."""
    special_ids: dict[str, int] | None = None
    """Ids of the tokens that a chat template knows by name, such as ``bos_token``; None if
    documents are no chats."""

    @property
    def is_chat(self) -> bool:
        """True if documents are chats."""
        return self.chat_template_sha256 is not None

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """Type of one id in ``tokens.bin``."""
        return _DTYPES[self.dtype]


_META = TypeAdapter(TokenMeta)


@dataclass(frozen=True, slots=True, eq=False)
class TokenData:
    """Open token directory, with memory-mapped arrays."""

    directory: Path
    meta: TokenMeta
    tokens: NDArray[np.unsignedinteger]
    """[num_tokens] Ids, uint16 or uint32."""
    document_offsets: NDArray[np.int64]
    """[num_documents + 1] Position of the first token of each document, then num_tokens."""
    loss_mask: NDArray[np.uint8] | None = None
    """[num_tokens] 0 if predicting the token does not count in the loss; None if all count."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the stream."""
        return self.meta.num_tokens

    @property
    def num_documents(self) -> int:
        """Number of documents in the stream, none of which is empty."""
        return self.meta.num_documents

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary of the tokenizer."""
        return self.meta.vocab_size

    def ids(self, low: int, high: int) -> NDArray[np.int64]:
        """Return the ids of tokens [low, high) of the stream, int64 [high - low].

        Raises:
            ValueError: An id is larger than any that was written, or the file has become shorter.
        """
        require_whole(self.tokens)
        ids = self.tokens[low:high].astype(np.int64)
        # A damaged file would otherwise surface as an index error deep inside a kernel.
        largest = int(ids.max())
        if largest > self.meta.max_id:
            raise ValueError(
                f"{self.directory / TOKENS_FILE}: id {largest} at token {low + int(ids.argmax())}, "
                f"but the largest id written was {self.meta.max_id}: {_CHANGED}"
            )
        return ids

    def document_starts(self, low: int, high: int) -> NDArray[np.int64]:
        """Return the positions in [low, high) of the stream at which documents start, int64.

        Raises:
            ValueError: The file has become shorter.
        """
        require_whole(self.document_offsets)
        starts = self.document_offsets[:-1]
        begin, end = np.searchsorted(starts, (low, high))
        return np.array(starts[begin:end], dtype=np.int64)

    def counts(self, low: int, high: int) -> NDArray[np.bool_]:
        """Return the loss mask of tokens [low, high) of the stream, bool [high - low].

        True if predicting the token counts in the loss; True for all tokens without a loss mask.

        Raises:
            ValueError: A byte is neither 0 nor 1, or the file has become shorter.
        """
        if self.loss_mask is None:
            return np.ones(high - low, dtype=np.bool_)
        require_whole(self.loss_mask)
        mask = self.loss_mask[low:high]
        if mask.max(initial=0) > 1:
            where = low + int(np.argmax(mask))
            raise ValueError(
                f"{self.directory / LOSS_MASK_FILE}: byte {self.loss_mask[where]} at token "
                f"{where}, neither 0 nor 1: {_CHANGED}"
            )
        counts: NDArray[np.bool_] = mask != 0
        return counts


def dtype_name(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the name of the smallest type that holds every id below ``vocab_size``."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def open_tokens(directory: Path | str) -> TokenData:
    """Memory-map the tokens in ``directory``, and check that its files belong together.

    The document starts are read and checked. The contents of ``tokens.bin`` and ``loss_mask.bin``
    are not read; :func:`verify_tokens` does that.

    Raises:
        ValueError: The directory does not exist, a file is missing or unreadable, the format has
            another version, sizes differ from ``meta.json``, or document starts are invalid.
    """
    directory = Path(directory)
    try:
        _check_files(directory)
        meta = read_meta(directory / META_FILE)
        tokens = _map_flat(directory / TOKENS_FILE, meta.num_tokens, meta.token_dtype)
        offsets = _map_offsets(directory / DOCUMENTS_FILE, meta)
        loss_mask = _map_loss_mask(directory / LOSS_MASK_FILE, meta)
    except OSError as error:
        raise ValueError(f"{directory}: cannot be read: {error.strerror or error}") from None
    return TokenData(directory, meta, tokens, offsets, loss_mask)


def _check_files(directory: Path) -> None:
    if directory.is_file():
        raise ValueError(
            f"{directory}: a file, not a directory of token data; make that of the file with"
            f" `sppo data prepare --tokenizer bytes --out OUT {directory}`, and name OUT here"
        )
    if not directory.is_dir():
        raise ValueError(
            f"{directory}: no such directory; token data is written by"
            f" `sppo data prepare --tokenizer DIR --out {directory} FILE...`, where DIR is that of"
            " the model, or bytes."
            f"{_directory_beside(directory)}"
        )
    missing = sorted(name for name in TOKEN_DATA_FILES if not (directory / name).is_file())
    if missing:
        raise ValueError(
            f"{directory}: {', '.join(missing)} missing; a token directory holds"
            f" {', '.join(sorted(TOKEN_DATA_FILES))}. If {directory} holds text, make token data of"
            f" it with `sppo data prepare --tokenizer bytes --out OUT {directory}`, and name OUT"
            " here"
        )


def _directory_beside(directory: Path) -> str:
    """Return ``" Did you mean 'mine'?"`` if a directory beside it has a name like it."""
    try:
        names = [path.name for path in directory.parent.iterdir() if path.is_dir()]
    except OSError:
        return ""
    return nearest(directory.name, names)


def verify_tokens(data: TokenData) -> None:
    """Read all files, and check their contents against the checksums in ``meta.json``.

    Raises:
        ValueError: ``tokens.bin`` or ``loss_mask.bin`` differs from its checksum, or the document
            starts differ from theirs or do not ascend.
    """
    _verify(data.tokens, data.meta.tokens_sha256, path=data.directory / TOKENS_FILE)
    _check_starts(data.document_offsets, data.meta, path=data.directory / DOCUMENTS_FILE)
    if data.loss_mask is not None and data.meta.loss_mask_sha256 is not None:
        _verify(data.loss_mask, data.meta.loss_mask_sha256, path=data.directory / LOSS_MASK_FILE)


def _verify(array: NDArray[Any], sha256: str, *, path: Path) -> None:
    """Raise ValueError unless `array`, mapped from `path`, has the given checksum."""
    digest = hashlib.sha256()
    block = _HASH_BLOCK_BYTES // array.itemsize
    for start in range(0, len(array), block):
        digest.update(array[start : start + block].data)
    if digest.hexdigest() != sha256:
        raise ValueError(
            f"{path}: sha256 {digest.hexdigest()[:12]}..., but {META_FILE} records"
            f" {one_line(sha256, most=12)}...: {_CHANGED}"
        )


def read_meta(path: Path) -> TokenMeta:
    """Read ``meta.json``, without checking the other files of the directory.

    Raises:
        ValueError: The file is not JSON, has another format version, or does not describe tokens.
        OSError: The file cannot be read.
    """
    fix = _PREPARE_HINT
    try:
        raw = read_json(path)
    except JsonError as error:
        raise ValueError(f"{error}; {fix}") from None
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version not in _READ_VERSIONS:
        readable = " and ".join(map(str, _READ_VERSIONS))
        raise ValueError(
            f"{path}: format_version {quoted(version)}, but this program reads {readable};"
            f" use the version of sppo that wrote it, or {fix}"
        )
    try:
        # As JSON, in which neither true nor "1" counts as 1.
        return _META.validate_json(json.dumps(raw), strict=True)
    except ValidationError as error:
        raise ValueError(f"{path}: {first_problem(error)}; {fix}") from None


def _map_flat(path: Path, num_tokens: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    expected_bytes = num_tokens * dtype.itemsize
    actual_bytes = path.stat().st_size
    if actual_bytes != expected_bytes or expected_bytes == 0:
        raise ValueError(
            f"{path}: {actual_bytes} bytes, but {META_FILE} says {num_tokens} tokens of"
            f" {dtype.name} = {expected_bytes} bytes (at least one token): the file was cut or"
            f" replaced; copy it again or {_PREPARE_HINT}"
        )
    return np.memmap(path, dtype=dtype, mode="r")


def _map_loss_mask(path: Path, meta: TokenMeta) -> NDArray[np.uint8] | None:
    if meta.loss_mask_sha256 is None:
        if path.exists():
            raise ValueError(
                f"{path}: {META_FILE} says nothing of a loss mask, so this is one of other data;"
                f" remove it, or {_PREPARE_HINT}"
            )
        return None
    if not path.is_file():
        raise ValueError(
            f"{path}: missing, and {META_FILE} says that there is a loss mask; copy it again or"
            f" {_PREPARE_HINT}"
        )
    return _map_flat(path, meta.num_tokens, np.dtype(np.uint8))


def _map_offsets(path: Path, meta: TokenMeta) -> NDArray[np.int64]:
    try:
        offsets = map_array(path)
    except ValueError as error:
        raise ValueError(f"{error}; {_PREPARE_HINT}") from None
    if offsets.dtype != np.int64 or offsets.shape != (meta.num_documents + 1,):
        raise ValueError(
            f"{path}: {one_line(offsets.dtype)} {quoted(list(offsets.shape))}, but {META_FILE} "
            f"says int64 [{meta.num_documents + 1}]: the files are not of one data set; "
            f"{_PREPARE_HINT}"
        )
    _check_starts(offsets, meta, path=path)
    return offsets


def _check_starts(offsets: NDArray[np.int64], meta: TokenMeta, *, path: Path) -> None:
    """Raise ValueError unless document starts ascend from 0 to `num_tokens`, with their checksum.

    Reads 8 bytes per document, one block at a time.
    """
    digest = hashlib.sha256()
    before = -1
    for first in range(0, len(offsets), _STARTS_BLOCK):
        block = np.ascontiguousarray(offsets[first : first + _STARTS_BLOCK])
        digest.update(block.data)
        previous = np.concatenate([[before], block[:-1]])
        wrong = block <= previous
        if wrong.any():
            index = int(wrong.argmax())
            rule = f"the one before is {int(previous[index])}"
            raise _bad_start(path, first + index, int(block[index]), rule)
        before = int(block[-1])
    if offsets[0] != 0:
        raise _bad_start(path, 0, int(offsets[0]), "the first document starts at 0")
    if before != meta.num_tokens:
        rule = f"the last is the num_tokens of {META_FILE}, {meta.num_tokens}"
        raise _bad_start(path, len(offsets) - 1, before, rule)
    if meta.documents_sha256 not in (None, digest.hexdigest()):
        raise ValueError(
            f"{path}: sha256 of its starts {digest.hexdigest()[:12]}..., but {META_FILE} records "
            f"{one_line(meta.documents_sha256, most=12)}...: {_CHANGED}"
        )


def _bad_start(path: Path, index: int, start: int, rule: str) -> ValueError:
    return ValueError(
        f"{path}: start {index} is {start}, but {rule}: the file was damaged or is of another "
        f"data set; {_PREPARE_HINT}"
    )
