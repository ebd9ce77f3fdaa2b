"""``sppo data``: write token data for runs, and report the lengths of its documents."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sppo.cli.arguments import Json, Overrides, RunFile, parse_length
from sppo.cli.command_group import CommandGroup
from sppo.cli.data_needle import needle
from sppo.cli.data_show import show
from sppo.cli.exit_codes import exit_codes
from sppo.cli.printing import Screen, columns, emit, item_table
from sppo.config import load_run
from sppo.data.mixture import Mixture, mixture_of
from sppo.data.preparation.prepare import PreparedTokens, prepare_tokens
from sppo.data.preparation.tokenizers import EndOfDocument
from sppo.data.run_tokens import open_data
from sppo.data.samples.length_stats import LengthStats, length_stats
from sppo.data.tokens import open_tokens
from sppo.quoting import one_line
from sppo.report.display import Display
from sppo.report.lines import print_line
from sppo.units import MIB, counted, format_bytes, format_count, format_tokens

_TELL_EVERY_S = 10.0

app = CommandGroup(help="Write and describe the token data that runs read.")
app.command()(needle)
app.command()(show)


@app.command()
def prepare(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Text files, one document each; rows, one document each under 'text', in .jsonl"
            " .json .parquet .arrow; text and JSON as .gz or .zst, too; directories are searched,"
            " hidden files left out, and may be of Dataset.save_to_disk.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory to write, for data.tokens of a run.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="bytes|ids|PATH",
            show_default=False,
            help="bytes: 256 byte values and an end of document; ids: 1-D integer .npy files taken"
            " as they are, with NAME.mask.npy beside NAME.npy as its loss mask (one bool for each"
            " id: whether predicting it counts); PATH: a tokenizer.json or its directory. Needed.",
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
            help="For ids: every id is below this. Without it the largest id + 1.",
        ),
    ] = None,
    end_of_document: Annotated[
        str,
        typer.Option(
            metavar="auto|none|ID",
            help="Id put after every document. auto: 256 for bytes, nothing for ids, the"
            " end-of-text token of a tokenizer file.",
        ),
    ] = "auto",
    force: Annotated[
        bool, typer.Option("--force", help="Replace token data already in --out.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Turn text, source code or ready-made ids into memory-mapped token data.

    The directory appears only when it is complete. Running the command again changes nothing.

        sppo data prepare --tokenizer bytes --out data/stdlib --glob '*.py' DIRECTORY
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
            force=force,
            on_progress=display.show,
        )
    fields = asdict(prepared)
    values = {**fields.pop("meta"), **fields}
    emit(lambda: values, lambda: _prepared_screen(prepared), as_json=json_output)


@app.command()
def stats(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Token data, written by sppo data prepare.")
    ],
    length: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Also tell how much is longer than N tokens, such as 6000.",
            show_default=False,
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """Report the lengths of documents, and the share of tokens in long documents.

    The length of a document is the number of its tokens in training: all but the last, one for each
    label.

        sppo data stats data/code --length 6000
    """
    with exit_codes():
        limit = parse_length(length)
        tokens = open_tokens(directory)
        found = length_stats(tokens, length=limit)
    emit(lambda: asdict(found), lambda: _screen(found), as_json=json_output)


@app.command()
def mix(run_file: RunFile, overrides: Overrides = None, json_output: Json = False) -> None:
    """Report what a run of data.sources draws from each source over train.steps.

    The share that is drawn differs from the share asked for, because a run ends within a block of
    draws, and because samples have different lengths.

        sppo data mix run.yaml train.steps=2000
    """
    with exit_codes():
        run = load_run(run_file, overrides or ())
        if run.data.sources is None:
            raise ValueError(
                f"{run_file}: data.tokens is not a mixture; write data.sources instead, e.g. "
                "data.sources={books: {tokens: data/books, weight: 60}, code: {tokens: data/code, "
                "weight: 40}}"
            )
        found = mixture_of(run, [open_data(run, path) for path in run.data.directories.values()])
    emit(lambda: asdict(found), lambda: _mixture_screen(found), as_json=json_output)


def _mixture_screen(found: Mixture) -> Screen:
    """Yield what a run draws from each source."""
    samples = sum(source.drawn_samples for source in found.sources)
    tokens = sum(source.drawn_tokens for source in found.sources)
    yield (
        f"{counted(found.steps, 'step')} draw {counted(samples, 'sample')} of "
        f"{format_count(tokens)} tokens; weights are shares of the {found.weights}, and every "
        f"{found.block:,} draws have exactly as many of each source"
    )
    cells = {
        "source": lambda source: source.name,
        "samples": lambda source: f"{source.samples:,}",
        "tokens": lambda source: format_count(source.tokens),
        "share asked": lambda source: f"{source.share_asked:.1%}",
        "drawn": lambda source: f"{source.share:.1%}",
        "samples drawn": lambda source: f"{source.drawn_samples:,}",
        "epochs": lambda source: f"{source.epochs:.2f}",
    }
    yield item_table(found.sources, cells)
    for source in found.sources:
        if source.epochs > source.max_epochs:
            yield f"{source.name}: more epochs than max_epochs {source.max_epochs:g}: refused"


def _screen(found: LengthStats) -> Screen:
    """Yield percentiles and buckets of document lengths."""
    percentiles = ", ".join(f"{name} {n:,}" for name, n in found.length_percentiles.items())
    yield (
        f"{found.directory}: {counted(found.num_documents, 'document')}, "
        f"{counted(found.num_tokens, 'token')} to train on (all but one of each document)"
    )
    yield f"length: mean {found.mean_length:,.1f}, {percentiles} tokens"
    yield _labels_text(found)
    buckets = {
        "up to": lambda bucket: format_tokens(bucket.up_to),
        "documents": lambda bucket: f"{bucket.num_documents:,}",
        "share": lambda bucket: f"{bucket.documents_share:.2%}",
        "tokens": lambda bucket: format_count(bucket.num_tokens),
        "share of tokens": lambda bucket: f"{bucket.tokens_share:.2%}",
        "longer documents": lambda bucket: f"{bucket.longer_documents_share:.2%}",
        "with tokens": lambda bucket: f"{bucket.longer_tokens_share:.2%}",
    }
    yield item_table(found.buckets, buckets, left=0)


def _labels_text(found: LengthStats) -> str:
    """Return the number of labels that count, and of documents without such labels, as text."""
    if not found.num_tokens:
        return "no labels: no document has two tokens, so there is nothing to train on"
    counting = "all labels count"
    if found.has_loss_mask:
        share = found.num_counting_labels / max(1, found.num_tokens)
        counting = f"{found.num_counting_labels:,} of the labels count ({share:.1%})"
    return f"{counting}; documents without any that counts: {found.num_documents_without_labels:,}"


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
    meta, empty = prepared.meta, prepared.num_empty_documents
    end = meta.tokenizer.end_of_document
    rows = {
        "documents": f"{meta.num_documents:,} from {counted(prepared.num_files, 'file')}"
        + (f" ({empty:,} empty ones left out)" if empty else ""),
        "tokens": f"{meta.num_tokens:,} from {format_bytes(prepared.source_bytes)},"
        f" {format_bytes(prepared.tokens_bytes)} as {meta.dtype}",
        "vocabulary": f"{meta.vocab_size:,} ids, {meta.max_id} the largest used;"
        + (" nothing ends a document" if end is None else f" {end} ends a document"),
    }
    if prepared.num_counting_tokens is not None:
        rows["loss mask"] = f"predicting {prepared.num_counting_tokens:,} of the tokens counts"
    yield columns([f"  {name}", text] for name, text in rows.items())
