"""Preparation of token directories from files, for ``sppo data prepare``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import numpy as np

from sppo.data.preparation.destination import Destination, destination
from sppo.data.preparation.documents import check_text_files, find_files
from sppo.data.preparation.ids_files import scan_ids, without_masks
from sppo.data.preparation.opening import reading
from sppo.data.preparation.row_encoder import Tokenizer
from sppo.data.preparation.row_options import DEFAULTS, RowOptions, end_for
from sppo.data.preparation.rows import holds_rows
from sppo.data.preparation.token_writer import check_destination
from sppo.data.preparation.tokenizer_file import load_tokenizer_file
from sppo.data.preparation.tokenizers import (
    BYTE_END_OF_DOCUMENT,
    BYTE_VOCAB_SIZE,
    ByteTokenizer,
    EncodedShard,
    EndOfDocument,
    end_id,
)
from sppo.data.preparation.workers import MOST_WORKERS, encoded
from sppo.data.tokens import TokenData, TokenMeta, open_tokens
from sppo.units import counted

_SHOWN_SOURCES = 3
_MOST_UNTRAINED = 0.01
"""Largest share of the documents without anything that is trained on, unless more are allowed."""

OnProgress = Callable[[int, int, int], None]
"""Function that is told the bytes of input read, all of them, and the number of tokens written."""


@dataclass(frozen=True, slots=True)
class HeldOutTokens:
    """Token directory of the documents that were held out."""

    directory: str
    num_documents: int
    num_tokens: int


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
    num_untrained_documents: int
    """Number of documents left out because nothing of them would be trained on."""
    untrained_documents: tuple[str, ...]
    """Sources of the first of them."""
    num_longer_documents: int
    """Number of documents left out because they are longer than asked for."""
    source_bytes: int
    tokens_bytes: int
    """Size of ``tokens.bin``."""
    num_counting_tokens: int | None
    """Number of tokens that the loss mask does not exclude; None without a mask."""
    held_out: HeldOutTokens | None
    """Documents that were held out; None if none were to be."""


def prepare_tokens(
    inputs: Sequence[Path],
    *,
    tokenizer: str,
    out: Path,
    globs: Sequence[str] = (),
    vocab_size: int | None = None,
    end_of_document: EndOfDocument = "auto",
    rows: RowOptions = DEFAULTS,
    held_out_out: Path | None = None,
    workers: int = 1,
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
        rows: Options for rows.
        held_out_out: Directory to write held-out documents to; None if none are held out.
        workers: Number of processes that tokenize.
        force: Replace token data that is already at ``out``.
        on_progress: Called after every block of input.

    Raises:
        ValueError: An input, an option or the destination is wrong; the user can correct it.
        MemoryError: A process of ``workers`` was ended.
        OSError: The disk is full (``ENOSPC``, ``EDQUOT``) or failed.
    """
    out = Path(out).resolve()
    outs = [out, *_held_out_directory(rows, held_out_out, out)]
    for directory in outs:
        check_destination(directory, force=force)
    if not 1 <= workers <= MOST_WORKERS:
        raise ValueError(f"--workers {workers}: a number of processes from 1 to {MOST_WORKERS}")
    if not globs and tokenizer == "ids":
        globs = ("*.npy",)
    found = find_files([Path(path) for path in inputs], globs=globs, exclude=out)
    paths = tuple(path for path in found if outs[-1] not in path.resolve().parents)
    if not paths:
        raise ValueError(f"{found[0]}: in the directory that is written; give other files")
    if tokenizer == "ids":
        paths = without_masks(paths)
    source_bytes = sum(map(_size_bytes, paths))
    row_format = rows.format_of(paths, tokenizer)
    chosen = choose_tokenizer(
        tokenizer,
        paths=paths,
        vocab_size=vocab_size,
        end_of_document=end_for(row_format, end_of_document),
    )
    if tokenizer != "ids":
        check_text_files(paths)
    encoder = rows.encoder(row_format, chosen, name=tokenizer)
    with ExitStack() as stack:
        places = [stack.enter_context(destination(place, chosen, force=force)) for place in outs]
        shards = encoded(paths, encoder, columns=rows.columns, workers=workers)
        left_out = _write(shards, places, total_bytes=source_bytes, on_progress=on_progress)
        _check_written(places, left_out, paths=paths, rows=rows)
        for place in places:
            place.finish(encoder.tokenizer, encoder.template, **encoder.described())
        for place in places:
            place.keep()
    return _summary(places, left_out, num_files=len(paths), source_bytes=source_bytes)


def _summary(
    places: Sequence[Destination],
    left_out: _LeftOutDocuments,
    *,
    num_files: int,
    source_bytes: int,
) -> PreparedTokens:
    written, *held_out = [open_tokens(place.out) for place in places]
    mask = written.loss_mask
    return PreparedTokens(
        directory=str(written.directory),
        unchanged=all(place.existing is not None for place in places),
        meta=written.meta,
        num_files=num_files,
        num_empty_documents=sum(place.writer.num_empty for place in places),
        num_untrained_documents=len(left_out.untrained),
        untrained_documents=tuple(left_out.untrained[:_SHOWN_SOURCES]),
        num_longer_documents=left_out.num_longer,
        source_bytes=source_bytes,
        tokens_bytes=written.num_tokens * written.tokens.itemsize,
        num_counting_tokens=None if mask is None else int(np.count_nonzero(mask)),
        held_out=_held_out_tokens(held_out[0]) if held_out else None,
    )


def _held_out_tokens(data: TokenData) -> HeldOutTokens:
    return HeldOutTokens(str(data.directory), data.num_documents, data.num_tokens)


def _held_out_directory(rows: RowOptions, held_out_out: Path | None, out: Path) -> list[Path]:
    """Return the directory of held-out documents, if there is one.

    Raises:
        ValueError: One of the options is given without the other, or both directories are one.
    """
    if held_out_out is None and rows.held_out is None:
        return []
    if held_out_out is None or rows.held_out is None:
        raise ValueError(
            "--held-out and --held-out-out: give both, the share of the documents and the directory"
            " they are written to"
        )
    place = Path(held_out_out).resolve()
    if place == out or place in out.parents or out in place.parents:
        raise ValueError(f"--held-out-out {place}: the same directory as --out, or one inside it")
    return [place]


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
        files = [path for path in paths if not holds_rows(path)]
        if vocab_size is None and len(files) < len(paths):
            raise ValueError(
                "--tokenizer ids: rows of ids do not tell the size of their vocabulary; give"
                " --vocab-size N, or the tokenizer.json that made them as --tokenizer"
            )
        return scan_ids(files, vocab_size=vocab_size, end_of_document=end_of_document)
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


@dataclass(slots=True)
class _LeftOutDocuments:
    """Documents that are not written."""

    untrained: list[str]
    """Sources of documents of which nothing is trained on."""
    num_longer: int = 0


def _write(
    shards: Iterable[EncodedShard],
    places: Sequence[Destination],
    *,
    total_bytes: int,
    on_progress: OnProgress,
) -> _LeftOutDocuments:
    """Write documents to the first destination, held-out ones to the last; return the others."""
    left_out = _LeftOutDocuments([])
    done_bytes = 0
    for shard in shards:
        writer = places[-1 if shard.held_out else 0].writer
        if shard.left_out is None:
            writer.append(shard.ids, shard.counts)
            if shard.ends_document:
                writer.end_document()
        elif shard.ends_document and shard.left_out == "untrained":
            left_out.untrained.append(shard.source)
        elif shard.ends_document:
            left_out.num_longer += 1
        done_bytes += shard.source_bytes
        on_progress(done_bytes, total_bytes, sum(place.writer.num_tokens for place in places))
    return left_out


def _check_written(
    places: Sequence[Destination],
    left_out: _LeftOutDocuments,
    *,
    paths: Sequence[Path],
    rows: RowOptions,
) -> None:
    """Check how many documents were written.

    Raises:
        ValueError: None were, to one of the places; or nothing is trained on in too many.
    """
    counts = [place.writer.num_documents for place in places]
    sources, num_documents = left_out.untrained, sum(counts) + len(left_out.untrained)
    if len(sources) > _MOST_UNTRAINED * num_documents and not rows.allow_empty:
        raise ValueError(
            f"{sources[0]}: nothing of it is trained on, as of {len(sources):,} of"
            f" {counted(num_documents, 'document')}, more than {_MOST_UNTRAINED:.0%}"
            f" ({', '.join(sources[:_SHOWN_SOURCES])}); look at them, choose another --train-on, or"
            " leave them out with --allow-empty"
        )
    if sum(counts) == 0:
        any_left_out = bool(sources or left_out.num_longer)
        raise ValueError(
            f"{paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}: no tokens: every"
            f" document is empty{' or left out' * any_left_out}; give files with contents"
        )
    if 0 in counts:
        raise ValueError(
            f"--held-out {rows.held_out}: {'all' if counts[0] == 0 else 'none'} of"
            f" {counted(sum(counts), 'document')}, as the text of each decides; give another share"
        )
