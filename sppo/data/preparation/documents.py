"""Finding the files to tokenize, and reading documents from them.

A file is one document, unless each of its lines is: ``{"text": ...}`` in a ``.jsonl`` file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from sppo.config.json_file import JsonError, parse_json
from sppo.quoting import one_line

_SHOWN_PATHS = 5
_HEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class TextDocument:
    """One document of text, with its source for messages."""

    text: str
    source: str
    """Path of the file, with the line number for ``.jsonl``."""
    source_bytes: int
    """Bytes of input of the document, line ends included."""


def find_files(
    inputs: Sequence[Path], *, globs: Sequence[str] = (), exclude: Path | None = None
) -> tuple[Path, ...]:
    """Return files in the given order, with directories replaced by their files, sorted by path.

    Hidden files and directories (``.git``) below a given directory are skipped, and links to
    directories are not followed.

    Args:
        inputs: Files and directories; at least one.
        globs: Patterns for files below directories; a pattern with a ``/`` is matched against the
            path below the directory, any other against the name. Empty for every file.
        exclude: Resolved path of a directory to skip, so that output does not become input.

    Raises:
        ValueError: A path does not exist or is not a regular file, or no file was found.
    """
    missing = [str(path) for path in inputs if not exists(path)]
    if missing:
        more = f" and {len(missing) - _SHOWN_PATHS} more" if len(missing) > _SHOWN_PATHS else ""
        shown = ", ".join(map(one_line, missing[:_SHOWN_PATHS]))
        raise ValueError(f"{shown}{more}: no such file or directory; check the spelling")
    found: list[Path] = []
    for path in inputs:
        if path.is_dir():
            found.extend(_files_below(path, globs=globs, exclude=exclude))
        elif path.is_file():
            found.append(path)
        else:
            raise ValueError(f"{path}: not a regular file; write its contents to a file first")
    if not found:
        patterns = f" that match {', '.join(globs)}" if globs else ""
        expanded = globs and not any(character in glob for glob in globs for character in "*?[")
        quotes = ", in quotes so that the shell leaves it as it is: '*.py'" if expanded else ""
        raise ValueError(
            f"{', '.join(str(path) for path in inputs)}: no files{patterns}"
            f" (hidden ones are left out); give other files or another --glob{quotes}"
        )
    return tuple(found)


def exists(path: Path) -> bool:
    """Return whether there is a file or directory; raise ValueError if this cannot be told."""
    with reading(path):
        return path.exists()


def _files_below(root: Path, *, globs: Sequence[str], exclude: Path | None) -> list[Path]:
    found: list[tuple[str, Path]] = []
    for folder, folders, names in os.walk(root, onerror=_refuse_unreadable):
        resolved = Path(folder).resolve()
        folders[:] = [
            name for name in folders if not name.startswith(".") and resolved / name != exclude
        ]
        for name in names:
            path = Path(folder, name)
            relative = path.relative_to(root).as_posix()
            if not name.startswith(".") and _matches(relative, globs) and path.is_file():
                found.append((relative, path))
    return [path for _, path in sorted(found)]


def _refuse_unreadable(error: OSError) -> None:
    raise ValueError(f"{error.filename}: cannot be read: {error.strerror}") from None


def _matches(relative: str, globs: Sequence[str]) -> bool:
    name = relative.rpartition("/")[2]
    return not globs or any(fnmatch(relative if "/" in glob else name, glob) for glob in globs)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert an OSError in the context into a ValueError with a message for the user.

    Args:
        path: Path that is read, for the message.

    Raises:
        ValueError: An OSError was raised in the context.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"{path}: cannot be read: {reason}; leave it out or fix it") from None


def check_text_files(paths: Sequence[Path]) -> None:
    """Check that files are text: without a zero byte among their first 64 Ki.

    Text may have any encoding without zero bytes. ``.jsonl`` files are checked when they are read.

    Raises:
        ValueError: A file is not text.
    """
    for path in paths:
        if holds_lines(path):
            continue
        with reading(path), path.open("rb") as file:
            position = file.read(_HEAD_BYTES).find(b"\0")
        if position >= 0:
            raise ValueError(
                f"{path} is not text: byte {position} is NUL. Unpack compressed files, convert text"
                " to UTF-8, or choose the text among the files with --glob, such as '*.txt'. If a"
                " model shall learn the bytes themselves, save them as uint8 .npy for --tokenizer"
                " ids"
            )


def read_text(paths: Sequence[Path]) -> Iterator[TextDocument]:
    """Yield the documents of files as text, one whole document at a time.

    Raises:
        ValueError: A file is unreadable or not UTF-8, or a line of a ``.jsonl`` file is invalid.
    """
    for path in paths:
        if holds_lines(path):
            yield from _read_lines(path)
        else:
            with reading(path):
                data = path.read_bytes()
            yield TextDocument(_decode(data, path), str(path), len(data))


def holds_lines(path: Path) -> bool:
    """Return whether each line of a file is a document, instead of the file."""
    return path.suffix == ".jsonl"


def _read_lines(path: Path) -> Iterator[TextDocument]:
    with reading(path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                source = f"{path}:{number}"
                yield TextDocument(_text_of(line, source), source, len(line))


def _text_of(line: bytes, source: str) -> str:
    fix = 'a line of a .jsonl file is an object such as {"text": "..."}'
    try:
        # Not strict: values other than the text are not used and may be anything.
        record = parse_json(line, source=source, strict=False)
    except JsonError as error:
        raise ValueError(f"{error}; {fix}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{source}: a {type(record).__name__}, not an object; {fix}")
    text = record.get("text")
    if not isinstance(text, str):
        keys = one_line(", ".join(list(record)[:_SHOWN_PATHS])) or "none"
        raise ValueError(f'{source}: no string under "text" (its keys: {keys}); {fix}')
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{source}: character {error.start} of the text is half of a surrogate pair, which is"
            " not text; repair or remove the line"
        ) from None
    return text


def _decode(data: bytes, path: Path) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: byte {error.start} is 0x{data[error.start]:02x}, which is not UTF-8; convert"
            " the file, leave it out with --glob, or use --tokenizer bytes, which takes any text"
        ) from None
