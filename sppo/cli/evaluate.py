"""``sppo eval``: loss on held-out tokens, by position in the context."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from sppo.api import evaluate_as_rank
from sppo.cli.arguments import (
    Checkpoint,
    EvaluatedLength,
    EvaluatedTokens,
    HuggingFaceModel,
    Initial,
    Json,
    OptionalRunFile,
    Overrides,
    Samples,
    load_evaluated_run,
)
from sppo.cli.exit_codes import exit_codes
from sppo.cli.printing import Screen, emit, item_table, table, told_in_tenths, written
from sppo.output_file import check_output_files
from sppo.plots.needle import needle_plot
from sppo.plots.positions import position_plot
from sppo.report.metrics import finite_or_none
from sppo.training.input_checks import EvaluatedWeights
from sppo.training.start import prepare_evaluation, start_ranks
from sppo.units import counted, format_count, format_tokens

if TYPE_CHECKING:
    from sppo.training.evaluation.evaluated_run import Evaluation, FoundNeedles


def evaluate(
    run_file: OptionalRunFile = None,
    overrides: Overrides = None,
    model: HuggingFaceModel = None,
    tokens: EvaluatedTokens = None,
    length: EvaluatedLength = None,
    samples: Annotated[
        Samples | None,
        typer.Option(help="Cut a stream, or evaluate each document by itself, as data.samples."),
    ] = None,
    checkpoint: Checkpoint = None,
    initial: Initial = False,
    sequences: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=1 << 48,
            help="Evaluate the first sequences, or samples, only.",
        ),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw loss by position here, or needles by length and depth."
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """Report the loss of a run's newest weights on data.eval_tokens, by position in the context.

    With --model, of a Hugging Face model, without a run file.

        sppo eval configs/run/tiny_cpu.yaml --sequences 4 --png loss_by_position.png
        sppo eval --model models/qwen3-8b --tokens data/held_out --length 32Ki
    """
    with exit_codes():
        run = load_evaluated_run(
            run_file, overrides or (), model=model, tokens=tokens, length=length, samples=samples
        )
        inputs = [] if run_file is None else [run_file]
        check_output_files({"--png": png}, plots=["--png"], inputs=inputs)
        weights = EvaluatedWeights(checkpoint, initial or model is not None)
        ready = prepare_evaluation(run, weights, console=Console(stderr=True, quiet=json_output))
        if ready.starts_ranks:
            raise typer.Exit(start_ranks(ready, sys.argv[1:]).exit_code)
        tell = told_in_tenths("sequence", Console(quiet=json_output or not ready.is_main))
        found = evaluate_as_rank(ready, weights, sequences=sequences, on_sequence=tell)
        if not ready.is_main:
            return
        if png is not None:
            _draw(found, png)
    emit(
        lambda: finite_or_none(asdict(found)),
        lambda: chain(_screen(found), written(png)),
        as_json=json_output,
    )


def _draw(found: Evaluation, path: Path) -> None:
    """Draw needles by length and depth into `path`, or the loss by position of other data."""
    weights = _weights(found)
    if found.needles is not None:
        exact, documents = (
            sum(getattr(cell, name) for cell in found.needles) for name in ("exact", "documents")
        )
        needle_plot(
            path,
            shares={(own.length, own.depth): own.exact / own.documents for own in found.needles},
            facts=(f"{exact} of {documents} found", found.tokens_from, weights),
        )
        return
    kind = "held-out" if found.held_out else "training"
    facts = (
        f"loss {found.loss:.3f}",
        f"perplexity {found.perplexity:.2f}",
        f"{format_count(found.num_tokens)} {kind} tokens of {found.tokens_from}",
        weights,
    )
    position_plot(path, {"": {"": found.by_position}}, facts=facts)


def _screen(found: Evaluation) -> Screen:
    """Yield needles by length and depth or the loss by position, and figures of all tokens."""
    if found.needles is None:
        yield "loss by position in the context"
        yield item_table(
            found.by_position,
            {
                "positions": lambda row: f"{row.start} to {row.end - 1}",
                "tokens": lambda row: str(row.num_tokens),
                "loss": lambda row: f"{row.loss:.4f}",
            },
            left=0,
        )
    else:
        yield "needles found, percent, by length of the document and depth of the needle"
        yield _needle_table(found.needles)
    sequences = counted(found.num_sequences, "sample" if found.are_samples else "sequence")
    what = "held-out tokens" if found.held_out else "training tokens (no data.eval_tokens given)"
    exact = "" if found.exact is None else f", exact {found.exact:.1%} of samples"
    yield (
        f"loss {found.loss:.4f}, perplexity {found.perplexity:.3f}, accuracy {found.accuracy:.1%}"
        f"{exact} over {found.num_tokens} {what} "
        f"in {sequences} of {found.tokens_from}, {_weights(found)}"
    )


def _weights(found: Evaluation) -> str:
    """Return which weights were evaluated; those that no run has trained have no step."""
    of_step = f"weights of step {found.step} from" if found.step else "by"
    return f"{of_step} {found.weights_from}"


def _needle_table(needles: Sequence[FoundNeedles]) -> Table:
    """Return the shares of needles found: a row for each depth, a column for each length."""
    shares = {(own.length, own.depth): own.exact / own.documents for own in needles}
    lengths = sorted({length for length, _ in shares})
    rows = (
        [f"{depth} %"]
        + [
            "" if share is None else f"{share:.0%}"
            for share in (shares.get((length, depth)) for length in lengths)
        ]
        for depth in sorted({depth for _, depth in shares})
    )
    return table(["depth", *map(format_tokens, lengths)], rows, left=0)
