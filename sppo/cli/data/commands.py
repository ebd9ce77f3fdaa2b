"""``sppo data``: write token data for runs, and report the lengths of its documents."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sppo.cli.arguments import Json, Overrides, RunFile, parse_length
from sppo.cli.command_group import CommandGroup
from sppo.cli.data.needle import needle
from sppo.cli.data.prepare import prepare
from sppo.cli.data.show import show
from sppo.cli.exit_codes import exit_codes
from sppo.cli.printing import Screen, emit, item_table
from sppo.config import load_run
from sppo.data.mixture import Mixture, mixture_of
from sppo.data.run_tokens import open_data
from sppo.data.samples.length_stats import LengthStats, length_stats
from sppo.data.tokens import open_tokens
from sppo.units import counted, format_count, format_tokens

app = CommandGroup(help="Write and describe the token data that runs read.")
app.command()(prepare)
app.command()(needle)
app.command()(show)


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
            yield (
                f"{source.name} would be read {source.epochs:.2f} times, more than its max_epochs "
                f"{source.max_epochs:g}: sppo train refuses this run"
            )


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
