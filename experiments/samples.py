"""Compare training on many samples with training on rows of the same documents, on one rank.

Lengths of documents are log-uniform. One side trains on every document as a sample, packed for each
step. The other trains on rows cut from the stream of the same documents, whose attention stops at
document boundaries: both sides attend to the same pairs, except for documents that a row cuts. Both
train a few steps in each turn; the first step of a turn is not counted, because it loads and
compiles.

    python -m experiments.samples DIR --output docs/results/compare_samples.json
"""

from __future__ import annotations

import argparse
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import sppo
from experiments import harness
from sppo.data.preparation.token_writer import TokenWriter
from sppo.data.tokens import TokenizerDescription, open_tokens

SHORTEST = 10
SIDES = ("samples", "rows")


def main() -> None:
    """Write tokens, train the sides in turns, report."""
    parser = harness.parser(__doc__)
    parser.add_argument("directory", type=Path, help="for tokens and runs")
    parser.add_argument("--model", default="tiny", help="preset, of which 4 layers are taken")
    parser.add_argument("--samples", type=harness.positive, default=100_000, help="documents")
    parser.add_argument("--longest", type=harness.positive, default=8000, help="tokens of one")
    parser.add_argument("--row", type=harness.positive, default=32768, help="tokens of a row")
    parser.add_argument("--turns", type=harness.positive, default=5)
    parser.add_argument("--steps", type=harness.positive, default=4, help="of a side and turn")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps {options.steps}: the first is not counted; write 2 or more")
    if options.row < options.longest:
        parser.error(f"--row {options.row}: a row holds the longest document, {options.longest}")
    tokens = options.directory / "tokens"
    if not tokens.exists():
        _write_documents(tokens, count=options.samples, longest=options.longest)
    counted: dict[str, list[sppo.StepMetrics]] = {side: [] for side in SIDES}
    for turn in range(1, options.turns + 1):
        for side in SIDES:
            run = _run(side, options, steps=turn * options.steps)
            done = sppo.train(run, progress=False).metrics[-options.steps + 1 :]
            counted[side] += done
            rate = statistics.median(step.tokens_per_s for step in done)
            print(f"  turn {turn} {side:<8} {rate:9.0f} tokens/s", flush=True)
    sides = {side: _figures(steps) for side, steps in counted.items()}
    ratio = sides["samples"]["tokens_per_s"] / sides["rows"]["tokens_per_s"]
    lengths = np.diff(open_tokens(tokens).document_offsets)
    # The last token of a sample is a label only.
    pairs = {"samples": _pairs(lengths - 1), "rows": _pairs(_in_rows(lengths, row=options.row))}
    print(f"samples: {ratio:.3f}x the tokens/s of rows; pairs a token {pairs}")
    found = {
        "model": options.model,
        "num_samples": len(lengths),
        "tokens": int(lengths.sum()),
        "row": options.row,
        "pairs_per_token": pairs,
        "sides": sides,
        "ratio": ratio,
    }
    harness.write_report(options.output, {**harness.header(), **found})


def _write_documents(directory: Path, *, count: int, longest: int) -> None:
    """Write documents of log-uniform lengths with random tokens."""
    random = np.random.default_rng(0)
    lengths = np.exp(random.uniform(np.log(SHORTEST), np.log(longest), count)).astype(np.int64)
    directory.mkdir(parents=True)
    description = TokenizerDescription(name="ids", end_of_document=None)
    with TokenWriter(directory, vocab_size=256, description=description) as writer:
        for length in lengths.tolist():
            writer.append(random.integers(256, size=length, dtype=np.uint16))
            writer.end_document()
        writer.finish()


def _run(side: str, options: argparse.Namespace, *, steps: int) -> sppo.RunConfig:
    """Return the run of a side that ends after `steps` steps."""
    if side == "samples":
        data: dict[str, Any] = {"samples": "documents"}
        length, per_step = options.longest, {"tokens_per_step": options.row}
    else:
        data = {"isolate_documents": True}
        length, per_step = options.row, {"sequences_per_step": 1}
    directory = options.directory.resolve()
    return sppo.load_run(
        {
            "model": {"preset": options.model, "num_layers": 4},
            "data": {"tokens": directory / "tokens", **data},
            "sequence": {"length": length},
            "optimizer": {"schedule": "constant"},
            "train": {"steps": steps, "output": directory / side, "dtype": "fp32", **per_step},
        }
    )


def _figures(steps: list[sppo.StepMetrics]) -> dict[str, Any]:
    return {
        "tokens_per_s": statistics.median(step.tokens_per_s for step in steps),
        "all_tokens_per_s": [step.tokens_per_s for step in steps],
        "tokens": [step.tokens for step in steps],
        "planning_wait_s": [step.planning_wait_s for step in steps],
    }


def _in_rows(lengths: np.ndarray, *, row: int) -> np.ndarray:
    """Return the lengths of the parts of documents in rows of the stream."""
    ends = np.cumsum(lengths)
    cuts = np.union1d(ends, np.arange(row, int(ends[-1]), row))
    return np.array([end - begin for begin, end in pairwise([0, *cuts.tolist()])])


def _pairs(lengths: np.ndarray) -> float:
    """Return the pairs of query and key per token."""
    return float((lengths * (lengths + 1) // 2).sum() / lengths.sum())


if __name__ == "__main__":
    main()
