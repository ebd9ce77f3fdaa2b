"""``sppo eval``: loss on held-out tokens, by position in the context."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from sppo.api import evaluate as evaluate_run
from sppo.cli.arguments.common import Json, Overrides, RunFile
from sppo.cli.exit_codes import exit_codes
from sppo.cli.output.printing import print_json, say, say_written, table
from sppo.config import load_run
from sppo.output_file import check_output_files
from sppo.plots.positions import position_plot
from sppo.units import counted, format_count

if TYPE_CHECKING:
    from sppo.training.evaluation import Evaluation


_PROGRESS_LINES = 10


def evaluate(
    run_file: RunFile,
    overrides: Overrides = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A checkpoint; without it the run's newest."),
    ] = None,
    initial: Annotated[
        bool,
        typer.Option(
            "--initial",
            help="Evaluate the weights that the run starts from: model.from_hf, or random ones.",
        ),
    ] = False,
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
        Path | None, typer.Option(metavar="FILE", help="Draw loss by position here.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Report the loss of a run's newest weights on data.eval_tokens, by position in the context.

    sppo eval configs/run/tiny_cpu.yaml --sequences 4 --png loss_by_position.png
    """
    console = Console(stderr=json_output)
    with exit_codes():
        run = load_run(run_file, overrides or ())
        check_output_files({"--png": png}, plots=["--png"], inputs=[run_file])

        def show_progress(done: int, total: int) -> None:
            if not json_output and done * _PROGRESS_LINES // total > (
                (done - 1) * _PROGRESS_LINES // total
            ):
                say(console, f"sequence {done} of {total}")

        result = evaluate_run(
            run,
            checkpoint=checkpoint,
            initial=initial,
            sequences=sequences,
            on_sequence=show_progress,
        )
        if png is not None:
            _draw(result, png)
    if json_output:
        print_json(_without_nan(asdict(result)), indent=2)
    else:
        _show(result, console)
        say_written(png)


def _without_nan(value: Any) -> Any:
    """Return a copy of `value` with None for NaN and infinity, which JSON cannot represent."""
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _draw(result: Evaluation, path: Path) -> None:
    """Draw the loss by position into `path`."""
    kind = "held-out" if result.held_out else "training"
    facts = (
        f"loss {result.loss:.3f}",
        f"perplexity {result.perplexity:.2f}",
        f"{format_count(result.num_tokens)} {kind} tokens of {result.tokens_from}",
        f"weights of step {result.step}",
    )
    edges = [*(row.start for row in result.by_position), result.by_position[-1].end]
    losses = [row.loss for row in result.by_position]
    position_plot(path, edges=edges, losses=losses, facts=facts)


def _show(result: Evaluation, console: Console) -> None:
    rows = (
        [f"{row.start} to {row.end - 1}", str(row.num_tokens), f"{row.loss:.4f}"]
        for row in result.by_position
    )
    say(console, "loss by position in the context")
    console.print(table(["positions", "tokens", "loss"], rows, left=0))
    sequences = counted(result.num_sequences, "sample" if result.are_samples else "sequence")
    what = "held-out tokens" if result.held_out else "training tokens (no data.eval_tokens given)"
    say(
        console,
        f"loss {result.loss:.4f}, perplexity {result.perplexity:.3f} over {result.num_tokens} "
        f"{what} in {sequences} of {result.tokens_from}, weights of step {result.step} from "
        f"{result.weights_from}",
    )
