"""Distinction of text and binary files by their first bytes."""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sppo.data.preparation.documents import JSONL_SUFFIX, reading

_HEAD_BYTES = 1 << 16
_SIGNATURES = {
    b"\x1f\x8b": "compressed by gzip",
    b"BZh91AY&SY": "compressed by bzip2",
    b"\xfd7zXZ\x00": "compressed by xz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"PK\x03\x04": "a zip archive",
    b"\x93NUMPY": "a NumPy array, which --tokenizer ids reads",
    b"PAR1": "a Parquet table",
    b"%PDF-": "a PDF",
}
_WITH_NUL = {
    codecs.BOM_UTF32_LE: "utf-32",  # before the mark of UTF-16, which is a prefix of this one
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Byte order marks of encodings in which characters contain NUL bytes."""
_CONTROL = bytes({*range(0x20), 0x7F} - set(b"\t\n\v\f\r\b\x1a\x1b"))
"""Control bytes that text does not use; white space, backspace, escape and DOS's end are text."""
_MOST_CONTROL = 0.02
"""Largest fraction of control bytes in text of an 8-bit encoding; compressed data has 0.1."""
_SHOWN_FILES = 3


def check_text_files(paths: Sequence[Path]) -> None:
    """Raise ValueError if a file is not text, judged by its first bytes.

    Text is valid UTF-8, UTF-16 or UTF-32 with a byte order mark, or any encoding of one or more
    bytes per character without NUL and with hardly any control characters (Latin-1, Shift JIS,
    KOI8-R). ``.jsonl`` files are skipped; they are checked when they are read.

    Raises:
        ValueError: Some files are not text; names the first few with the reasons, and the number
            of others.
    """
    found = [
        (path, reason)
        for path in paths
        if path.suffix != JSONL_SUFFIX and (reason := _why_binary(path)) is not None
    ]
    if found:
        shown = "; ".join(f"{path} is not text: {reason}" for path, reason in found[:_SHOWN_FILES])
        more = f"; and {len(found) - _SHOWN_FILES} more" if len(found) > _SHOWN_FILES else ""
        raise ValueError(
            f"{shown}{more}. Unpack compressed files, convert text to UTF-8"
            f"{_choice_of_text(paths, [path for path, _ in found])}. If a model shall learn the"
            " bytes themselves, save them as uint8 .npy for --tokenizer ids"
        )


def _choice_of_text(paths: Sequence[Path], binary: Sequence[Path]) -> str:
    """Return a hint with the --glob that matches most text files and no binary file; "" if none."""
    refused = {_pattern(path) for path in binary}
    counts = Counter(pattern for path in paths if (pattern := _pattern(path)) not in refused)
    if not counts:
        return ""
    ((pattern, count),) = counts.most_common(1)
    files = "file" if count == 1 else "files"
    return f", or choose the text among them, as --glob '{pattern}' does ({count} {files})"


def _pattern(path: Path) -> str:
    """Return the glob of files with the suffix of ``path``; without a suffix, its name."""
    return f"*{path.suffix}" if path.suffix else path.name


def _why_binary(path: Path) -> str | None:
    with reading(path), path.open("rb") as file:
        return why_binary(file.read(_HEAD_BYTES))


def why_binary(head: bytes) -> str | None:
    """Return why a file that begins with ``head`` is binary; None if it is text."""
    for signature, name in _SIGNATURES.items():
        if head.startswith(signature):
            return name
    for mark, encoding in _WITH_NUL.items():
        if head.startswith(mark) and _decodes(head, encoding):
            return None
    if b"\0" in head:
        return f"byte {head.index(0)} is NUL"
    if _decodes(head, "utf-8"):
        return None
    fraction = 1 - len(head.translate(None, _CONTROL)) / len(head)
    return (
        f"{fraction:.0%} of its bytes are control characters" if fraction > _MOST_CONTROL else None
    )


def _decodes(head: bytes, encoding: str) -> bool:
    """Return whether ``head``, which may end inside a character, is text in ``encoding``."""
    try:
        codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return False
    return True
