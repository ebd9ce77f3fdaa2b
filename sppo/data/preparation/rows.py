"""Rows of files: lines of ``.jsonl``, lists in ``.json``, tables in ``.parquet`` and ``.arrow``.

Any other file is one row, with its text under the key ``text``. Files of text may end in ``.gz`` or
``.zst`` besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sppo.config.json_file import JsonError, parse_json
from sppo.data.preparation.opening import (
    content_suffix,
    opened,
    pyarrow_for,
    reading_errors,
    refuse_unreadable,
)

_HEAD_BYTES = 1 << 16
_SLICE_BYTES = 4 << 20
_SLICE_ROWS = 512


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file, with its source for messages."""

    values: Mapping[str, Any]
    """Values by key; keys without a value are left out."""
    source: str
    """Path of the file, with the number of the line or row, from 1 on."""
    source_bytes: int
    """Bytes of the file that were read since the row before, for progress."""


def holds_rows(path: Path) -> bool:
    """Return whether a file holds rows, instead of being one document."""
    return content_suffix(path) in _READERS


def read_rows(path: Path, *, columns: frozenset[str]) -> Iterator[Row]:
    """Yield the rows of a file in order.

    Args:
        path: File of any kind; what is not of a kind with rows is text in UTF-8, one row.
        columns: Columns of a table to read; those that it lacks are left out.

    Raises:
        ValueError: The file is damaged or unreadable, or a row is not an object; names the row.
    """
    reader = _READERS.get(content_suffix(path), _read_whole)
    row = None
    try:
        for row in reader(path, columns):
            yield row
    except reading_errors() as error:
        refuse_unreadable(str(path) if row is None else f"{path}: after {row.source}", error)


def _read_whole(path: Path, _: frozenset[str]) -> Iterator[Row]:
    with opened(path) as (contents, file):
        data = contents.read()
        yield Row({"text": _decode(data, path)}, str(path), file.tell())


def _decode(data: bytes, path: Path) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: byte {error.start} is 0x{data[error.start]:02x}, which is not UTF-8; convert"
            " the file, leave it out with --glob, or use --tokenizer bytes, which takes any text"
        ) from None


def _read_lines(path: Path, _: frozenset[str]) -> Iterator[Row]:
    done_bytes = 0
    with opened(path) as (contents, file):
        for number, line in enumerate(contents, start=1):
            if line.strip():
                source = f"{path}:{number}"
                values = _object(_parse(line, source), source)
                before, done_bytes = done_bytes, file.tell()
                yield Row(values, source, done_bytes - before)


def _read_json(path: Path, columns: frozenset[str]) -> Iterator[Row]:
    """Yield the rows of a list, or of lines."""
    with opened(path) as (contents, _file):
        is_list = contents.read(_HEAD_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    if not is_list:
        yield from _read_lines(path, columns)
        return
    with opened(path) as (contents, file):
        listed = _parse(contents.read(), str(path))
        source_bytes = file.tell()
    for number, values in enumerate(listed, start=1):
        source = f"{path}, row {number}"
        share = source_bytes * number // len(listed) - source_bytes * (number - 1) // len(listed)
        yield Row(_object(values, source), source, share)


_FIX = (
    'a row is an object such as {"text": "..."}: a line of a .jsonl file, or an item of the list in'
    " a .json file; leave files of other JSON out with --glob, or call them .txt to train on their"
    " text"
)


def _parse(data: bytes, source: str) -> Any:
    try:
        # Not strict: values that are not used may be anything.
        return parse_json(data, source=source, strict=False)
    except JsonError as error:
        raise ValueError(f"{error}; {_FIX}") from None


def _object(value: Any, source: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{source}: a {type(value).__name__}, not an object; {_FIX}")
    return {key: item for key, item in value.items() if item is not None}


def _read_parquet(path: Path, columns: frozenset[str]) -> Iterator[Row]:
    pyarrow_for(path)
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        metadata = file.metadata
        groups = range(metadata.num_row_groups)
        size = sum(metadata.row_group(number).total_byte_size for number in groups)
        slice_rows = min(_SLICE_ROWS, 1 + _SLICE_BYTES * metadata.num_rows // (1 + size))
        wanted = _wanted(file.schema_arrow.names, columns)
        share = path.stat().st_size / max(1, metadata.num_rows)
        first = 1
        for batch in file.iter_batches(slice_rows, columns=wanted):
            yield from _batch_rows(batch, path, first, int(share * batch.num_rows))
            first += batch.num_rows


def _read_arrow(path: Path, columns: frozenset[str]) -> Iterator[Row]:
    """Yield the rows of a stream, which ``Dataset.save_to_disk`` writes, or of an Arrow file."""
    arrow = pyarrow_for(path)
    with arrow.memory_map(str(path)) as file:
        if file.read(6) == b"ARROW1":
            table = arrow.ipc.open_file(file)
            schema, batches = table.schema, map(table.get_batch, range(table.num_record_batches))
        else:
            file.seek(0)
            batches = arrow.ipc.open_stream(file)
            schema = batches.schema
        wanted = _wanted(schema.names, columns)
        first, done_bytes = 1, 0
        for batch in batches:
            batch = batch.select(wanted)
            batch.validate(full=True)  # offsets beyond its text would end the process
            slice_rows = min(_SLICE_ROWS, 1 + _SLICE_BYTES * batch.num_rows // (1 + batch.nbytes))
            for start in range(0, batch.num_rows, slice_rows):
                part = batch.slice(start, slice_rows)
                before, done_bytes = done_bytes, file.tell()
                yield from _batch_rows(part, path, first + start, done_bytes - before)
            first += batch.num_rows


def _wanted(names: Sequence[str], columns: frozenset[str]) -> list[str]:
    """Return the names of the columns to read; all names, for a message, if none is known."""
    return [name for name in names if name in columns] or list(names)


def _batch_rows(batch: Any, path: Path, first: int, source_bytes: int) -> Iterator[Row]:
    """Yield the rows of a record batch, whose first is row ``first`` of the file."""
    try:
        values = batch.to_pylist()
    except UnicodeDecodeError as error:
        place = f"{path}, rows {first} to {first + batch.num_rows - 1}"
        raise ValueError(f"{place}: text that is not UTF-8 ({error.reason}); repair it") from None
    for number, row in enumerate(values, start=first):
        yield Row(_without_nulls(row), f"{path}, row {number}", source_bytes)
        source_bytes = 0


def _without_nulls(value: Any) -> Any:
    """Return a value of a table without the keys that its type has for other rows.

    A null under ``content`` stays, since a message of an assistant that calls tools has it.
    """
    if isinstance(value, dict):
        kept = ((key, item) for key, item in value.items() if item is not None or key == "content")
        return {key: _without_nulls(item) for key, item in kept}
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return [_without_nulls(item) for item in value]
    return value


_READERS: Mapping[str, Callable[[Path, frozenset[str]], Iterator[Row]]] = {
    ".jsonl": _read_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
