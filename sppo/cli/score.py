"""``sppo score``: log-probabilities of documents, and which of them greedy decoding gives."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer
from rich.console import Console

from sppo.cli.arguments import (
    Checkpoint,
    EvaluatedLength,
    EvaluatedTokens,
    HuggingFaceModel,
    Initial,
    Json,
    OptionalRunFile,
    Overrides,
    load_evaluated_run,
)
from sppo.cli.exit_codes import exit_codes
from sppo.cli.printing import Screen, emit, told_in_tenths
from sppo.output_file import check_output_files, whole_file
from sppo.report.metrics import finite_or_none
from sppo.training.input_checks import EvaluatedWeights
from sppo.training.start import evaluating_job, prepare_evaluation, start_ranks
from sppo.units import counted

if TYPE_CHECKING:
    from sppo.training.evaluation.scoring import DocumentScore


def score(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE.jsonl", help="File to write.")
    ],
    run_file: OptionalRunFile = None,
    overrides: Overrides = None,
    model: HuggingFaceModel = None,
    tokens: EvaluatedTokens = None,
    length: EvaluatedLength = None,
    checkpoint: Checkpoint = None,
    initial: Initial = False,
    per_token: Annotated[
        bool, typer.Option("--per-token", help="Write the log-probability of each label as well.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Write the log-probability of every document, of its labels that count.

    Each line is an object: document, logprob (nats, of all labels together), labels, and exact,
    which is true if greedy decoding gives all labels, and null without any. With --per-token also
    positions (of the labels in the document) and logprobs.

        sppo score run.yaml --tokens data/pairs -o scores.jsonl
        sppo score --model models/qwen3-8b --tokens data/pairs -o scores.jsonl --per-token
    """
    with exit_codes():
        run = load_evaluated_run(
            run_file,
            overrides or (),
            model=model,
            tokens=tokens,
            length=length,
            samples="documents",
            whole=True,
        )
        inputs = [] if run_file is None else [run_file]
        check_output_files({"-o": output}, inputs=inputs)
        weights = EvaluatedWeights(checkpoint, initial or model is not None)
        ready = prepare_evaluation(run, weights, console=Console(stderr=True, quiet=json_output))
        if ready.starts_ranks:
            raise typer.Exit(start_ranks(ready, sys.argv[1:]).exit_code)
        file = whole_file(output) if ready.is_main else nullcontext()
        tell = told_in_tenths("document", Console(quiet=json_output or not ready.is_main))
        with file as opened, evaluating_job(ready, weights) as job:
            from sppo.training.evaluation.scoring import score as score_documents

            scores = _Scores(str(output), opened, per_token=per_token)
            source = weights.source(run)
            score_documents(job, source, on_document=scores.write, on_done=tell)
    if ready.is_main:
        emit(lambda: asdict(scores.summary), scores.screen, as_json=json_output)


@dataclass(slots=True)
class ScoreSummary:
    """Totals over the documents of a written file of scores."""

    file: str
    documents: int = 0
    labels: int = 0
    exact: int = 0
    """Number of documents whose labels greedy decoding gives."""
    logprob: float | None = 0.0
    """Log-probability of all labels together, in nats; None if it is not finite."""


class _Scores:
    """Lines of scores, and their summary.

    Args:
        path: Path of the file, for the summary.
        file: Open file; None on ranks that write nothing.
        per_token: Whether lines have the log-probability of each label.
    """

    def __init__(self, path: str, file: BinaryIO | None, *, per_token: bool) -> None:
        self._file, self._per_token = file, per_token
        self._logprob = 0.0
        self.summary = ScoreSummary(path)

    def write(self, found: DocumentScore) -> None:
        """Write the line of a document."""
        assert self._file is not None, "rank 0 gets the scores"
        logprob, labels = float(found.log_probabilities_L.sum()), len(found.positions_L)
        line: dict[str, Any] = {
            "document": found.document,
            "logprob": finite_or_none(logprob),
            "labels": labels,
            "exact": found.is_exact,
        }
        if self._per_token:
            line["positions"] = found.positions_L.tolist()
            line["logprobs"] = [*map(finite_or_none, found.log_probabilities_L.tolist())]
        self._file.write((json.dumps(line, allow_nan=False) + "\n").encode())
        told = self.summary
        told.documents += 1
        told.labels += labels
        told.exact += found.is_exact is True
        self._logprob += logprob
        told.logprob = finite_or_none(self._logprob)

    def screen(self) -> Screen:
        """Yield what was written."""
        told = self.summary
        mean = self._logprob / told.labels if told.labels else float("nan")
        yield (
            f"written {told.file}: {counted(told.documents, 'document')}, "
            f"{counted(told.labels, 'label')}, log-probability {mean:.4f} each in the mean, "
            f"{told.exact:,} documents exact"
        )
