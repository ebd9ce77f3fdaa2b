"""Preparation of a token directory from files, for ``sppo data prepare``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import numpy as np

from sppo.data.preparation.documents import check_text_files, find_files
from sppo.data.preparation.ids_files import IdsTokenizer, scan_ids, without_masks
from sppo.data.preparation.opening import reading
from sppo.data.preparation.token_writer import (
    TokenWriter,
    check_destination,
    move_into_place,
    temporary_sibling,
)
from sppo.data.preparation.tokenizer_file import FileTokenizer, load_tokenizer_file
from sppo.data.preparation.tokenizers import (
    BYTE_END_OF_DOCUMENT,
    BYTE_VOCAB_SIZE,
    ByteTokenizer,
    EndOfDocument,
    end_id,
)
from sppo.data.tokens import META_FILE, TokenData, TokenMeta, open_tokens, verify_tokens
from sppo.units import counted

Tokenizer = ByteTokenizer | IdsTokenizer | FileTokenizer


OnProgress = Callable[[int, int, int], None]
"""Function that is told the bytes of input read, all of them, and the number of tokens written."""


@dataclass(frozen=True, slots=True)
class PreparedTokens:
    """Summary of a token directory that was written, or existed already with the same tokens."""

    directory: str
    _: KW_ONLY
    unchanged: bool
    """True if the directory already held exactly these tokens, so that nothing was written."""
    meta: TokenMeta
    num_files: int
    num_empty_documents: int
    """Number of documents without tokens, which are left out."""
    source_bytes: int
    tokens_bytes: int
    """Size of ``tokens.bin``."""
    num_counting_tokens: int | None
    """Number of tokens that the loss mask does not exclude; None without a mask."""


def prepare_tokens(
    inputs: Sequence[Path],
    *,
    tokenizer: str,
    out: Path,
    globs: Sequence[str] = (),
    vocab_size: int | None = None,
    end_of_document: EndOfDocument = "auto",
    force: bool = False,
    on_progress: OnProgress = lambda done, total, tokens: None,
) -> PreparedTokens:
    """Tokenize ``inputs`` into the directory ``out``; on an error the disk is unchanged.

    Args:
        inputs: Files and directories, in order; see :func:`.documents.find_files`.
        tokenizer: ``bytes``, ``ids``, or the path of a ``tokenizer.json``.
        out: Directory to write; created only when it is complete.
        globs: Patterns for files below directories; for ``ids`` the default is ``*.npy``.
        vocab_size: For ``ids`` only; None takes the largest id + 1.
        end_of_document: Id appended to every document; see :data:`EndOfDocument`.
        force: Replace token data that is already at ``out``.
        on_progress: Called after every block of input.

    Raises:
        ValueError: An input, an option or the destination is wrong; the user can correct it.
        OSError: The disk is full (``ENOSPC``, ``EDQUOT``) or failed.
    """
    out = Path(out).resolve()
    check_destination(out, force=force)
    existing = None if force or not (out / META_FILE).exists() else open_tokens(out)
    if not globs and tokenizer == "ids":
        globs = ("*.npy",)
    paths = find_files([Path(path) for path in inputs], globs=globs, exclude=out)
    if tokenizer == "ids":
        paths = without_masks(paths)
    source_bytes = sum(map(_size_bytes, paths))
    with temporary_sibling(out) as temporary:
        chosen = choose_tokenizer(
            tokenizer, paths=paths, vocab_size=vocab_size, end_of_document=end_of_document
        )
        if existing is not None:
            _refuse_other_tokenizer(existing, chosen)
        if tokenizer != "ids":
            check_text_files(paths)
        num_empty = _write(
            temporary, chosen, paths=paths, total_bytes=source_bytes, on_progress=on_progress
        )
        written = open_tokens(temporary)
        if existing is None:
            move_into_place(temporary, out)
        else:
            _refuse_difference(existing, written)
    mask = written.loss_mask
    return PreparedTokens(
        directory=str(out),
        unchanged=existing is not None,
        meta=written.meta,
        num_files=len(paths),
        num_empty_documents=num_empty,
        source_bytes=source_bytes,
        tokens_bytes=written.num_tokens * written.tokens.itemsize,
        num_counting_tokens=None if mask is None else int(np.count_nonzero(mask)),
    )


def choose_tokenizer(
    name: str,
    *,
    paths: Sequence[Path],
    vocab_size: int | None,
    end_of_document: EndOfDocument,
) -> Tokenizer:
    """Return the tokenizer for the option ``--tokenizer name``.

    Raises:
        ValueError: There is no such tokenizer, or another option does not apply to it.
    """
    if name == "ids":
        return scan_ids(paths, vocab_size=vocab_size, end_of_document=end_of_document)
    if vocab_size is not None:
        raise ValueError(
            f"--vocab-size {vocab_size}: only for --tokenizer ids; --tokenizer {name} has its own"
            " vocabulary. Leave it out"
        )
    if name == "bytes":
        own, size = BYTE_END_OF_DOCUMENT, BYTE_VOCAB_SIZE
        return ByteTokenizer(end_id(end_of_document, own=own, vocab_size=size))
    return load_tokenizer_file(name, end_of_document=end_of_document)


def _size_bytes(path: Path) -> int:
    with reading(path):
        return path.stat().st_size


def _write(
    directory: Path,
    tokenizer: Tokenizer,
    *,
    paths: Sequence[Path],
    total_bytes: int,
    on_progress: OnProgress,
) -> int:
    """Write the token directory; return the number of empty documents, which are left out."""
    done_bytes = 0
    with TokenWriter(
        directory, vocab_size=tokenizer.vocab_size, description=tokenizer.description
    ) as writer:
        for shard in tokenizer.encode(paths):
            writer.append(shard.ids, shard.counts)
            if shard.ends_document:
                writer.end_document()
            done_bytes += shard.source_bytes
            on_progress(done_bytes, total_bytes, writer.num_tokens)
        if writer.num_tokens == 0:
            raise ValueError(
                f"{paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}: no tokens:"
                " every document is empty; give files with contents"
            )
        writer.finish()
        return writer.num_empty


_REPLACE = "replace it with --force, or give a new name"


def _refuse_other_tokenizer(existing: TokenData, tokenizer: Tokenizer) -> None:
    """Raise ValueError, before any tokenization, if the existing data has another tokenizer."""
    wanted, there = tokenizer.description, existing.meta.tokenizer
    same = (there.sha256, there.end_of_document) == (wanted.sha256, wanted.end_of_document)
    if existing.vocab_size != tokenizer.vocab_size or not same:
        raise ValueError(
            f"--out {existing.directory}: holds tokens of tokenizer {there.name}, vocabulary"
            f" {existing.vocab_size}, end of document {there.end_of_document}; asked for"
            f" {wanted.name}, {tokenizer.vocab_size}, {wanted.end_of_document}. {_REPLACE}"
        )


def _refuse_difference(existing: TokenData, written: TokenData) -> None:
    same = existing.meta.tokens_sha256 == written.meta.tokens_sha256 and np.array_equal(
        existing.document_offsets, written.document_offsets
    )
    if not same:
        raise ValueError(
            f"--out {existing.directory}: holds other tokens ({existing.num_tokens} in"
            f" {counted(existing.num_documents, 'document')}, not {written.num_tokens} in"
            f" {written.num_documents}); {_REPLACE}"
        )
    if existing.meta.loss_mask_sha256 != written.meta.loss_mask_sha256:
        with_mask = existing.meta.loss_mask_sha256 is not None
        raise ValueError(
            f"--out {existing.directory}: holds these tokens with"
            f" {'another' if with_mask else 'no'} loss mask; {_REPLACE}"
        )
    verify_tokens(existing)
