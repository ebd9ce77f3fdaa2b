"""Formats of rows: which columns a row has, and the document that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from sppo.data.chat.conversation import Chat
from sppo.data.chat.marked_text import MarkedText
from sppo.data.chat.rows import chat_of
from sppo.data.preparation.rows import Row
from sppo.quoting import one_line, quoted

Format = Literal["text", "messages", "prompt_completion", "alpaca", "ids"]
FORMATS: tuple[Format, ...] = get_args(Format)
_NEEDED: Mapping[Format, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "ids": ("input_ids",),
}
"""Columns that each row of a format has."""
_MASKS = ("loss_mask", "completion_mask", "assistant_masks")
_FURTHER = ("tools", "chat_template_kwargs", "system", "history", "input", "labels", *_MASKS)
_OTHER_NAME = "conversations"
"""Usual name of the column ``messages`` in data whose messages have the keys from and value."""
COLUMNS = frozenset({*_FURTHER, _OTHER_NAME}.union(*_NEEDED.values()))
"""Columns that documents are made of; others are not read."""
_LISTS = frozenset({"messages", "input_ids"})
_SHOWN_KEYS = 8
_IGNORED = -100
"""Label that does not count, in data for transformers."""


@dataclass(frozen=True, slots=True)
class IdsDocument:
    """Ready-made ids of a document."""

    ids: NDArray[Any]
    """[n] Integers."""
    counts: NDArray[np.bool_] | None
    """[n] Whether predicting each id counts in the loss; None if all count."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Format of all rows of a data set."""

    name: Format
    is_chat: bool = False
    """Whether rows are conversations, of which a chat template makes text."""
    names: Mapping[str, str] | None = None
    """Names that the files have for columns, by column, where they differ."""
    first: str = "the first row"
    """Source of the row that shows the format, for messages."""

    def document(self, row: Row) -> MarkedText | Chat | IdsDocument:
        """Return the document of a row; of prompt and completion, the completion is trained on.

        Raises:
            ValueError: The row has another format, or breaks a rule of this one.
        """
        values = _values(row, self.names or {})
        missing = [name for name in _NEEDED[self.name] if name not in values]
        others = _formats_of(values)
        if missing and others:
            raise ValueError(f"{row.source}: {others[0]}, {self._mixed()}")
        if missing:
            raise self._wrong(row, missing[0])
        if self.name == "ids":
            return _ids_document(values, row.source)
        if self.is_chat:
            return chat_of(values, row.source)
        if self.name == "text":
            return MarkedText(self._string(values, "text", row), None)
        prompt, completion = (self._string(values, name, row) for name in _NEEDED[self.name])
        length = len(prompt) + len(completion)
        return MarkedText(prompt + completion, ((len(prompt), length),) if completion else ())

    def _string(self, values: Mapping[str, Any], column: str, row: Row) -> str:
        if isinstance(values[column], str):
            return str(values[column])
        if isinstance(values[column], list) and self.name == "prompt_completion":
            raise ValueError(f"{row.source}: {column} of messages, {self._mixed()}")
        raise self._wrong(row, column)

    def _wrong(self, row: Row, column: str) -> ValueError:
        """Return the error of a row without a column of the format."""
        name = (self.names or {}).get(column, column)
        kind = "list" if column in _LISTS else "string"
        return ValueError(
            f'{row.source}: no {kind} under "{one_line(name)}" (its keys: {_keys(row)}); a row has'
            " text, messages, prompt and completion, instruction and output, or input_ids; keys of"
            f" other names are given as --column {column}=NAME"
        )

    def _mixed(self) -> str:
        kind = "chats of format " if self.is_chat else ""
        return (
            f"and {self.first} is {kind}{self.name}: all rows have one format; choose files with"
            " --glob, or prepare each format by itself"
        )


TEXT = RowFormat("text")
"""Format of files that are one document each."""


def require_text(text: str, source: str) -> None:
    """Raise ValueError if a string is not text, which has no half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{source}: character {error.start} of the text is half of a surrogate pair, which is"
            " not text; repair or remove the row"
        ) from None


def row_format(row: Row, *, asked: str = "auto", names: Mapping[str, str]) -> RowFormat:
    """Return the format of the rows of a data set, as the first one shows it.

    Args:
        row: First row.
        asked: Format that the user names, or ``auto``.
        names: Names that the files have for columns, by column.

    Raises:
        ValueError: The row has the columns of no format, or of several; or an option names a format
            or a column that there is not.
    """
    if asked not in ("auto", *FORMATS):
        raise ValueError(f"--format {one_line(asked)}: write auto, {', '.join(FORMATS)}")
    for column in names.keys() - COLUMNS:
        known = ", ".join(sorted(COLUMNS))
        raise ValueError(f"--column {one_line(column)}: no column; columns are {known}")
    values = _values(row, names)
    found = [name for name in _formats_of(values) if asked in ("auto", name)]
    if len(found) > 1:  # a column that the user names is meant to be read
        found = [name for name in found if names.keys() & {*_NEEDED[name]}] or found
    if len(found) > 1:
        raise ValueError(
            f"{row.source}: has the columns of {' and of '.join(found)}; choose one of them with"
            " --format"
        )
    name: Format = next((name for name in FORMATS if name in (*found, asked)), "text")
    is_chat = name in ("messages", "alpaca") or (
        name == "prompt_completion" and isinstance(values.get("prompt"), list)
    )
    made = RowFormat(name, is_chat, dict(names), row.source)
    if not found:
        raise made._wrong(row, next(key for key in _NEEDED[name] if key not in values))
    return made


def _values(row: Row, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a row by column."""
    values = {name: value for name, value in row.values.items() if name in COLUMNS}
    if _OTHER_NAME in values and "messages" not in names:
        if "messages" in values:
            raise ValueError(
                f"{row.source}: has messages and {_OTHER_NAME}; choose one of them with --column"
                f" messages=messages or messages={_OTHER_NAME}"
            )
        values["messages"] = values[_OTHER_NAME]
    for column, name in names.items():
        values.pop(column, None)
        if name in row.values:
            values[column] = row.values[name]
    return values


def _formats_of(values: Mapping[str, Any]) -> list[Format]:
    """Return the formats whose columns a row has."""
    return [name for name, needed in _NEEDED.items() if all(key in values for key in needed)]


def _keys(row: Row) -> str:
    return one_line(", ".join(map(str, list(row.values)[:_SHOWN_KEYS]))) or "none"


def _ids_document(values: Mapping[str, Any], source: str) -> IdsDocument:
    ids = _whole_numbers(values["input_ids"], "input_ids", source)
    counts = None
    if "labels" in values:
        labels = _like(values["labels"], "labels", ids, source)
        counts = labels != _IGNORED
        wrong = counts & (labels != ids)
        if wrong.any():
            place = int(wrong.argmax())
            raise ValueError(
                f"{source}: label {labels[place]} at position {place}, where input_ids has"
                f" {ids[place]}: a label is the id at its position, or {_IGNORED} where it does not"
                " count; do not shift labels"
            )
    for name in _MASKS:
        if name in values:
            mask = _like(values[name], name, ids, source)
            if mask.size and not 0 <= mask.min() <= mask.max() <= 1:
                raise ValueError(
                    f"{source}: {name} holds {mask[(mask < 0) | (mask > 1)][0]}; weights of labels"
                    " are not supported: write 1 where an id counts, or 0"
                )
            counts = mask == 1 if counts is None else counts & (mask == 1)
    return IdsDocument(ids, counts)


def _like(value: Any, name: str, ids: NDArray[Any], source: str) -> NDArray[Any]:
    """Return numbers, one for each id."""
    numbers = _whole_numbers(value, name, source)
    if len(numbers) != len(ids):
        raise ValueError(
            f"{source}: {len(numbers)} {name} for {len(ids)} input_ids; give one for each id"
        )
    return numbers


def _whole_numbers(value: Any, name: str, source: str) -> NDArray[Any]:
    try:
        numbers = np.asarray(value)
        if numbers.size == 0 and isinstance(value, list):
            return np.zeros(0, dtype=np.int64)
        if numbers.dtype == np.bool_:
            numbers = numbers.astype(np.int64)
        if numbers.ndim == 1 and numbers.dtype.kind in "iu":
            return numbers
    except (ValueError, OverflowError):  # lists of different lengths
        pass
    raise ValueError(f"{source}: {name} {quoted(value)}: not a list of whole numbers")
