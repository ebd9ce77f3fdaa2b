"""What the user asks of rows: their format, the part that is trained on, and what is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import get_args

from sppo.data.chat.template import DEFAULT_DATE, ChatTemplate, TrainOn
from sppo.data.preparation.columns import COLUMNS, TEXT, Format, RowFormat, row_format
from sppo.data.preparation.row_encoder import RowEncoder, Tokenizer
from sppo.data.preparation.rows import holds_rows, read_rows
from sppo.data.preparation.tokenizer_file import FileTokenizer
from sppo.data.preparation.tokenizers import EndOfDocument
from sppo.quoting import one_line
from sppo.units import LARGEST_SIZE, parse_size

_CHOICES: Mapping[tuple[Format, bool], tuple[TrainOn, ...]] = {
    ("text", False): ("all",),
    ("messages", True): ("assistant", "last", "all"),
    ("prompt_completion", True): ("completion", "assistant", "last", "all"),
    ("prompt_completion", False): ("completion", "all"),
    ("alpaca", True): ("assistant", "last", "completion", "all"),
    ("ids", False): (),
}
"""What may be trained on, by format and whether its rows are chats; the default first."""


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Options of ``sppo data prepare`` for rows; the defaults are those of the command."""

    _: KW_ONLY
    format: str = "auto"
    """Format of the rows; ``auto`` for the one whose columns the first row has."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names that the files have for columns, by column."""
    train_on: str | None = None
    """Part of a document that is trained on; None for the default of the format."""
    chat_template: str | None = None
    """Path of a chat template, or ``chatml``; None for that of the tokenizer."""
    date: str | None = None
    """Day that chat templates write; None for :data:`DEFAULT_DATE`."""
    longer_than: str | None = None
    """``LEN=drop`` or ``LEN=refuse`` for longer documents; None for none."""
    held_out: str | None = None
    """Share of the documents that are held out, such as ``1%``; None for none."""
    allow_empty: bool = False
    """Whether any share of the documents may have nothing that is trained on."""

    @property
    def columns(self) -> frozenset[str]:
        """Columns of tables to read."""
        return COLUMNS | {*self.names.values()}

    def format_of(self, paths: Sequence[Path], tokenizer: str) -> RowFormat:
        """Return the format of the documents of files.

        Raises:
            ValueError: The format cannot be told, or files have other ones.
        """
        with_rows = [path for path in paths if holds_rows(path)]
        rows = (row for path in with_rows for row in read_rows(path, columns=self.columns))
        first = next(rows, None)
        if first is None:
            found = replace(TEXT, name="ids") if tokenizer == "ids" else TEXT
        else:
            found = row_format(first, asked=self.format, names=self.names)
        if tokenizer == "ids" and found.name != "ids":
            raise ValueError(
                f"--tokenizer ids: rows of {found.first} are of format {found.name}; ready-made ids"
                " stand under input_ids. Give the path of a tokenizer.json for text"
            )
        if self.format not in ("auto", found.name):
            raise ValueError(f"--format {self.format}: no file holds rows; leave it out")
        others = [] if tokenizer == "ids" else [path for path in paths if not holds_rows(path)]
        if found.name != "text" and others:
            raise ValueError(
                f"{others[0]} is a text, and rows such as {found.first} are of format {found.name};"
                " choose files with --glob, or prepare each format by itself"
            )
        return found

    def encoder(self, format: RowFormat, tokenizer: Tokenizer, *, name: str) -> RowEncoder:
        """Return what makes tokens of documents.

        Args:
            format: Format of the documents.
            tokenizer: Tokenizer that was chosen.
            name: Name under which the user gives it.

        Raises:
            ValueError: An option does not suit the format, or there is no chat template.
        """
        train_on = self._train_on(format)
        longest, drops_longer = self._longest()
        template = None
        if format.is_chat:
            if not isinstance(tokenizer, FileTokenizer):
                raise ValueError(
                    f"--tokenizer {name}: {format.first} is a chat, whose template is written in"
                    " special tokens; give the path of a tokenizer.json, or of its directory"
                )
            date = DEFAULT_DATE if self.date is None else self.date
            template = ChatTemplate.load(name, self.chat_template, date)
        elif self.chat_template is not None or self.date is not None:
            option = "--date" if self.chat_template is None else "--chat-template"
            raise ValueError(
                f"{option}: only for chats; {format.first} is of format {format.name}. Leave it out"
            )
        return RowEncoder(
            tokenizer,
            format,
            template=template,
            train_on=train_on,
            held_out=self._held_out(),
            longest=longest,
            drops_longer=drops_longer,
        )

    def _train_on(self, format: RowFormat) -> TrainOn | None:
        choices = _CHOICES[format.name, format.is_chat]
        if self.train_on is None:
            return choices[0] if choices else None
        if self.train_on not in choices:
            known = self.train_on in get_args(TrainOn)
            rule = (
                f"write {', '.join(choices)}" if choices else "their labels tell it; leave it out"
            )
            where = f"rows of format {format.name}: {rule}" if known else rule
            raise ValueError(f"--train-on {one_line(self.train_on)}: {where}")
        return self.train_on

    def _longest(self) -> tuple[int | None, bool]:
        """Return the most tokens of a document, and whether longer ones are dropped."""
        if self.longer_than is None:
            return None, True
        length, _, fate = self.longer_than.partition("=")
        try:
            longest = parse_size(length)
        except ValueError as error:
            raise ValueError(f"--longer-than: {error}") from None
        if fate not in ("drop", "refuse") or not 1 <= longest <= LARGEST_SIZE:
            raise ValueError(
                f"--longer-than {one_line(self.longer_than)}: write LEN=drop or LEN=refuse, such as"
                " 128Ki=drop"
            )
        return longest, fate == "drop"

    def _held_out(self) -> float:
        """Return the share of documents that are held out."""
        if self.held_out is None:
            return 0.0
        try:
            is_percent = self.held_out.endswith("%")
            share = float(self.held_out.removesuffix("%")) / (100 if is_percent else 1)
        except ValueError:
            share = -1
        if not 0 < share < 1:
            raise ValueError(
                f"--held-out {one_line(self.held_out)}: write a share of the documents, such as 1%"
            )
        return share


DEFAULTS = RowOptions()


def end_for(format: RowFormat, asked: EndOfDocument) -> EndOfDocument:
    """Return what ends documents of a format: nothing, for chats and ready-made ids, by default.

    Raises:
        ValueError: An id is asked for after chats.
    """
    if format.is_chat and isinstance(asked, int):
        raise ValueError(
            f"--end-of-document {asked}: {format.first} is a chat, which ends as its template ends"
            " it; leave it out"
        )
    return "none" if format.is_chat or (format.name == "ids" and asked == "auto") else asked
