"""Finding the files to tokenize, and reading documents of text from them.

A file is one document, unless it holds rows (:mod:`sppo.data.preparation.rows`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from sppo.config.json_file import JsonError, read_json
from sppo.data.chat.marked_text import MarkedText
from sppo.data.preparation.columns import TEXT, require_text
from sppo.data.preparation.opening import opened, reading
from sppo.data.preparation.rows import holds_rows, read_rows
from sppo.quoting import one_line

_SHOWN_PATHS = 5
_HEAD_BYTES = 1 << 16
_TEXT_COLUMNS = frozenset({"text"})


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
    found: list[tuple[str, list[Path]]] = []
    for folder, folders, names in os.walk(root, onerror=_refuse_unreadable):
        resolved = Path(folder).resolve()
        folders[:] = [
            name for name in folders if not name.startswith(".") and resolved / name != exclude
        ]
        saved = _saved_dataset(Path(folder), names)
        if saved:
            found.append((Path(folder).relative_to(root).as_posix(), saved))
            continue
        for name in names:
            path = Path(folder, name)
            relative = path.relative_to(root).as_posix()
            if not name.startswith(".") and _matches(relative, globs) and path.is_file():
                found.append((relative, [path]))
    return [path for _, paths in sorted(found) for path in paths]


def _saved_dataset(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return the files of rows of what ``Dataset.save_to_disk`` wrote, in order; else none.

    Raises:
        ValueError: The folder holds several splits, or the rows are chosen by another file.
    """
    if "dataset_dict.json" in names:
        splits = [path.name for path in sorted(folder.iterdir()) if path.is_dir()]
        raise ValueError(
            f"{folder}: a saved DatasetDict with the splits {one_line(', '.join(splits))}; give"
            f" one of them, such as {folder / splits[0] if splits else folder / 'train'}"
        )
    if "state.json" not in names or "dataset_info.json" not in names:
        return []
    try:
        with reading(folder / "state.json"):
            state = read_json(folder / "state.json")
        files = [folder / str(file["filename"]) for file in state["_data_files"]]
        indices = state.get("_indices_data_files") or state.get("_indices_files")
    except (JsonError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{folder / 'state.json'}: not what Dataset.save_to_disk writes; save the data set"
            " again, or give its .arrow files"
        ) from None
    if indices:
        raise ValueError(
            f"{folder}: its rows are chosen by a file of indices; call flatten_indices() before"
            " save_to_disk()"
        )
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        raise ValueError(f"{one_line(missing[0])}: missing, and state.json names it; copy it again")
    return files


def _refuse_unreadable(error: OSError) -> None:
    raise ValueError(f"{error.filename}: cannot be read: {error.strerror}") from None


def _matches(relative: str, globs: Sequence[str]) -> bool:
    name = relative.rpartition("/")[2]
    return not globs or any(fnmatch(relative if "/" in glob else name, glob) for glob in globs)


def check_text_files(paths: Sequence[Path]) -> None:
    """Check that files are text: without a zero byte among their first 64 Ki.

    Text may have any encoding without zero bytes. Files of rows are checked when they are read.

    Raises:
        ValueError: A file is not text.
    """
    for path in paths:
        if holds_rows(path):
            continue
        with reading(path), opened(path) as (contents, _file):
            position = contents.read(_HEAD_BYTES).find(b"\0")
        if position >= 0:
            raise ValueError(
                f"{path} is not text: byte {position} is NUL. Unpack archives, convert text"
                " to UTF-8, or choose the text among the files with --glob, such as '*.txt'. If a"
                " model shall learn the bytes themselves, save them as uint8 .npy for --tokenizer"
                " ids"
            )


def read_text(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the documents of files of text, and of rows with text, one whole document at a time.

    Raises:
        ValueError: A file is damaged, unreadable or not UTF-8, or a row has no text.
    """
    for path in paths:
        for row in read_rows(path, columns=_TEXT_COLUMNS):
            document = TEXT.document(row)
            assert isinstance(document, MarkedText)
            require_text(document.text, row.source)
            yield document.text
