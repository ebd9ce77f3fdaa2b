"""``sppo data prepare``: turn files into the token data that runs read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sppo.cli.arguments import Json
from sppo.cli.data.show import document_screen
from sppo.cli.exit_codes import exit_codes
from sppo.cli.printing import Screen, columns, emit
from sppo.data.document_text import document_text
from sppo.data.preparation.prepare import PreparedTokens, prepare_tokens
from sppo.data.preparation.row_options import RowOptions
from sppo.data.preparation.tokenizers import EndOfDocument
from sppo.data.tokens import open_tokens
from sppo.quoting import one_line
from sppo.report.display import Display
from sppo.report.lines import print_line
from sppo.units import MIB, counted, format_bytes, format_count

_TELL_EVERY_S = 10.0
_SHOWN_CHARACTERS = 600
"""Most characters of each part of the first document, which shows the mask."""


def prepare(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Text files, one document each; .jsonl, .json, .parquet and .arrow, one in each"
            " row; text and JSON may end in .gz or .zst. Directories, also those of"
            " Dataset.save_to_disk, are searched, hidden files left out.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory to write, for data.tokens of a run.")
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="bytes|ids|PATH",
            show_default=False,
            help="PATH: a tokenizer.json or its directory; bytes: 256 byte values and an end of"
            " document; ids: 1-D integer .npy files taken as they are, with NAME.mask.npy beside"
            " NAME.npy as its loss mask (one bool for each id: whether predicting it counts), or"
            " rows of input_ids. Needed.",
        ),
    ] = None,
    glob: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Which files below a directory, e.g. '*.py'; may be given several times."
            " Without it all of them, or *.npy for ids.",
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=1 << 32,
            help="For ids: every id is below this. Without it the largest id + 1 of .npy files.",
        ),
    ] = None,
    end_of_document: Annotated[
        str,
        typer.Option(
            metavar="auto|none|ID",
            help="Id put after every document. auto: 256 for bytes, nothing for ids and chats, the"
            " end-of-text token of a tokenizer file.",
        ),
    ] = "auto",
    format: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="Format of rows: text, messages, prompt_completion, alpaca or ids. auto: the one"
            " whose keys the first row has.",
        ),
    ] = "auto",
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=NAME",
            help="Name that a key has in the files, e.g. text=body; may be given several times.",
        ),
    ] = None,
    train_on: Annotated[
        str | None,
        typer.Option(
            metavar="assistant|last|completion|all",
            show_default=False,
            help="What is trained on. Without it the answers of chats, completions, all of a text.",
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|chatml",
            show_default=False,
            help="Template that makes text of chats. Without it the tokenizer's own.",
        ),
    ] = None,
    date: Annotated[
        str | None,
        typer.Option(
            metavar="DAY",
            show_default=False,
            help="Today in chat templates; 26 Jul 2024 without it.",
        ),
    ] = None,
    longer_than: Annotated[
        str | None,
        typer.Option(
            metavar="N=drop|refuse",
            show_default=False,
            help="Leave out, or refuse, documents longer than N tokens, e.g. 128Ki=drop.",
        ),
    ] = None,
    held_out: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            show_default=False,
            help="Share of the documents for --held-out-out, e.g. 1%, chosen by their text.",
        ),
    ] = None,
    held_out_out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", show_default=False, help="Directory of held-out documents."),
    ] = None,
    allow_empty: Annotated[
        bool,
        typer.Option(
            "--allow-empty",
            help="Leave out documents of which nothing is trained on even if they are more than"
            " 1 % of all.",
        ),
    ] = False,
    workers: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of processes that tokenize.")
    ] = 1,
    force: Annotated[
        bool, typer.Option("--force", help="Replace token data already in --out.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Turn text, chats or ready-made ids into memory-mapped token data.

    The directory appears only when it is complete. Running the command again changes nothing.

        sppo data prepare --tokenizer bytes --out data/stdlib --glob '*.py' DIRECTORY
        sppo data prepare --tokenizer models/qwen3 --out data/chat chats.jsonl.zst
    """
    console = Console(stderr=True, quiet=json_output)
    with exit_codes(), _Tokenizing(console) as display:
        if tokenizer is None:
            raise ValueError(
                "--tokenizer: how does text become ids? Write bytes, the path of a tokenizer.json, "
                "or ids for files of ready-made ones"
            )
        prepared = prepare_tokens(
            files,
            tokenizer=tokenizer,
            out=out,
            globs=glob or (),
            vocab_size=vocab_size,
            end_of_document=_end_of_document(end_of_document),
            rows=RowOptions(
                format=format,
                names=_names(column or ()),
                train_on=train_on,
                chat_template=chat_template,
                date=date,
                longer_than=longer_than,
                held_out=held_out,
                allow_empty=allow_empty,
            ),
            held_out_out=held_out_out,
            workers=workers,
            force=force,
            on_progress=display.show,
        )
    fields = asdict(prepared)
    values = {**fields.pop("meta"), **fields}
    emit(lambda: values, lambda: _prepared_screen(prepared), as_json=json_output)


def _end_of_document(text: str) -> EndOfDocument:
    if text == "auto":
        return "auto"
    if text == "none":
        return "none"
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"--end-of-document {one_line(text)}: write auto, none or the number of a token"
        ) from None


def _names(given: Sequence[str]) -> dict[str, str]:
    """Return the names that files have for columns, by column."""
    names = {}
    for text in given:
        column, separator, name = text.partition("=")
        if not (column and separator and name):
            raise ValueError(f"--column {one_line(text)}: write KEY=NAME, such as text=body")
        names[column] = name
    return names


class _Tokenizing(Display):
    """Progress of tokenizing: a bar in MiB on a terminal, else a line every ten seconds.

    Args:
        console: Console to write to.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._next_s = time.monotonic() + _TELL_EVERY_S
        if self._progress is not None:
            self._task = self._progress.add_task("MiB", total=None)

    def show(self, done_bytes: int, total_bytes: int, num_tokens: int) -> None:
        """Advance the bar, or print a line if it is time."""
        now_s, tokens = time.monotonic(), f"{format_count(num_tokens)} tokens"
        done, total = done_bytes // MIB, total_bytes // MIB
        if self._progress is not None:
            text = f"{tokens}, of MiB"
            self._progress.update(self._task, completed=done, total=total, description=text)
        elif now_s >= self._next_s:
            self._next_s = now_s + _TELL_EVERY_S
            print_line(f"{done} of {total} MiB, {tokens}", self._console)


def _prepared_screen(prepared: PreparedTokens) -> Screen:
    """Yield whether token data were written, and what they hold."""
    verb = "holds these tokens already; nothing was written" if prepared.unchanged else "written"
    yield f"{prepared.directory}: {verb}"
    meta = prepared.meta
    end = meta.tokenizer.end_of_document
    rows = {
        "documents": f"{meta.num_documents:,} from {counted(prepared.num_files, 'file')}"
        + _left_out(prepared),
        "tokens": f"{meta.num_tokens:,} from {format_bytes(prepared.source_bytes)},"
        f" {format_bytes(prepared.tokens_bytes)} as {meta.dtype}",
        "vocabulary": f"{meta.vocab_size:,} ids, {meta.max_id} the largest used;"
        + (" nothing ends a document" if end is None else f" {end} ends a document"),
    }
    if prepared.num_counting_tokens is not None:
        rows["loss mask"] = f"predicting {prepared.num_counting_tokens:,} of the tokens counts"
    if prepared.held_out is not None:
        held_out = prepared.held_out
        rows["held out"] = (
            f"{counted(held_out.num_documents, 'document')} of {held_out.num_tokens:,} tokens in"
            f" {held_out.directory}"
        )
    yield columns([f"  {name}", text] for name, text in rows.items())
    if prepared.untrained_documents:
        yield f"nothing is trained on in {', '.join(prepared.untrained_documents)}"
    if prepared.num_counting_tokens is not None and meta.format not in (None, "ids"):
        first = document_text(open_tokens(prepared.directory), 0)
        yield from document_screen(first, most_characters=_SHOWN_CHARACTERS)


def _left_out(prepared: PreparedTokens) -> str:
    """Return the numbers of documents that were left out, in parentheses."""
    reasons = {
        "empty": prepared.num_empty_documents,
        "without trained tokens": prepared.num_untrained_documents,
        "longer": prepared.num_longer_documents,
    }
    left_out = [f"{number:,} {reason}" for reason, number in reasons.items() if number]
    return f" (left out: {', '.join(left_out)})" if left_out else ""
