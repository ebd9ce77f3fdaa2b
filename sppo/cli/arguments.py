"""Arguments of several commands, and the loading of the run of a planning or evaluating command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sppo.config import RunConfig, load_run
from sppo.config.base import MOST_SAMPLES, MOST_TOKENS
from sppo.config.longest_document import longest_document
from sppo.data.tokens import CELLS_FILE
from sppo.units import parse_size

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.")]
OptionalRunFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN.yaml]", help="The run file; none with --model.", show_default=False
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SECTION.KEY=VALUE]...",
        help="Values that replace those of the file, e.g. train.steps=20 sequence.length=64Ki.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Checkpoint = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="A checkpoint; without it the run's newest."),
]
Initial = Annotated[
    bool,
    typer.Option(
        "--initial",
        help="Evaluate the weights that the run starts from: model.from_hf, or random ones.",
    ),
]
HuggingFaceModel = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Evaluate a Hugging Face model instead of a run; needs --tokens."
    ),
]
EvaluatedTokens = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Token data to evaluate, instead of data.eval_tokens."),
]
EvaluatedLength = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Tokens of a sequence, or of the longest document, instead of sequence.length.",
        show_default=False,
    ),
]
Samples = Literal["stream", "documents"]

_NOTE = (
    "data.samples=documents: planned for the longest samples, of sequence.length tokens; each step "
    "is planned when sppo train knows its samples"
)


def load_planned_run(run_file: Path, overrides: Sequence[str]) -> RunConfig:
    """Load a run file for planning.

    With ``data.samples=documents`` a note on stderr says for which samples the run is planned.

    Raises:
        ValueError: The run file cannot be used.
    """
    run = load_run(run_file, overrides)
    if run.data.samples == "documents":
        typer.echo(_NOTE, err=True)
    return run


def parse_length(text: str | None) -> int | None:
    """Return the number of tokens that the option ``--length`` gives.

    Raises:
        ValueError: The text is not a length.
    """
    if text is None:
        return None
    try:
        length = parse_size(text)
    except ValueError as error:
        raise ValueError(f"--length: {error}") from None
    if not 1 <= length <= MOST_TOKENS:
        raise ValueError(f"--length {length}: a length is from 1 to {MOST_TOKENS:,} tokens")
    return length


def load_evaluated_run(
    run_file: Path | None,
    overrides: Sequence[str],
    *,
    model: Path | None,
    tokens: Path | None,
    length: str | None,
    samples: Samples | None,
    whole: bool = False,
) -> RunConfig:
    """Load the run whose weights are evaluated, with the tokens to evaluate as its held-out ones.

    Needle data is evaluated by whole documents.

    Args:
        run_file: Run file; with `model` this word is an override, or None.
        overrides: ``section.key=value`` words.
        model: Directory of a Hugging Face model, for which a run is made.
        tokens: Token data to evaluate; None for those of the run.
        length: Tokens of a sequence, or of the longest document; None for that of the run, or of
            the longest document if these are evaluated whole.
        samples: Unit of the data; None for that of the run.
        whole: Evaluate documents whole: none may be longer than the length.

    Raises:
        ValueError: Arguments are missing or exclude each other, or the run cannot be used.
    """
    asked = parse_length(length)
    if model is None:
        if run_file is None:
            raise ValueError("name a run file, or a Hugging Face model: --model DIR --tokens DIR")
        run = load_run(run_file, overrides)
    else:
        run = _run_of_model(model, run_file, overrides, tokens=tokens, length=asked)
    directory = tokens or run.data.eval_tokens or run.data.tokens
    if directory is not None and samples != "stream":
        is_needles = (Path(directory) / CELLS_FILE).exists()
        whole = whole or is_needles
        samples = "documents" if whole else samples
    if asked is None and whole and directory is not None:
        asked = max(1, longest_document(Path(directory)))
        asked = asked if model is not None else max(asked, run.sequence.length)
    elif asked is None and model is not None:
        raise ValueError(f"--model {model}: say what to evaluate as well, with --length N")
    changed: dict[str, Any] = {}
    if tokens is not None:
        changed["data.eval_tokens"] = str(tokens)
    if asked not in (None, run.sequence.length):
        changed |= {"sequence.length": asked, "sequence.boundaries": None}
    if samples == "documents":
        changed |= {
            "data.samples": samples,
            "sequence.boundaries": None,
            "train.sequences_per_step": 1,
            "train.samples_per_step": MOST_SAMPLES,  # of a step, which an evaluation has not
            "train.tokens_per_step": None,
        }
    elif samples == "stream":
        changed |= {
            "data.samples": samples,
            "sequence.longer": "cut",
            "train.samples_per_step": None,
            "train.tokens_per_step": None,
        }
    if whole:
        changed["sequence.longer"] = "refuse"
    # Replicas may gather weights together, as they evaluate equally many subsequences.
    zero = run.parallel.zero
    return load_run(run, {**changed, "parallel.zero": min(zero, 1)}).with_values(
        {"parallel.zero": zero}
    )


def _run_of_model(
    model: Path,
    first: Path | None,
    overrides: Sequence[str],
    *,
    tokens: Path | None,
    length: int | None,
) -> RunConfig:
    """Return a run that starts from a Hugging Face model, for its evaluation.

    Args:
        model: Directory of the model.
        first: First word of the command, which must be an override.
        overrides: Further overrides.
        tokens: Token data to evaluate.
        length: Tokens of a sequence; None if it is not known yet.
    """
    words = [] if first is None else [str(first)]
    if words and "=" not in words[0]:
        raise ValueError(f"--model {model} and the run file {first}: leave out one of both")
    if tokens is None:
        raise ValueError(f"--model {model}: say what to evaluate as well, with --tokens DIR")
    sections = {
        "model": {"from_hf": str(model)},
        "data": {"tokens": str(tokens)},
        "sequence": {"length": length or 1},
    }
    return load_run(sections, [*words, *overrides])
