"""Compare training on many samples with training on rows of the same documents, on one rank.

Lengths of documents are log-uniform. One side trains on every document as a sample, packed for each
step. The other trains on rows cut from the stream of the same documents, whose attention stops at
document boundaries: both sides attend to the same pairs, except for documents that a row cuts. Both
train a few steps in each turn; the first step of a turn is not counted, because it loads and
compiles.

    python scripts/compare_samples.py DIR --output docs/results/compare_samples.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from option_types import output_file, positive
from pipeline_ranks import provenance  # beside this file

import sppo
from sppo.data.preparation.token_writer import TokenWriter
from sppo.data.tokens import TokenizerDescription, open_tokens
from sppo.output_file import write_text

SHORTEST, LONGEST = 10, 8000
MODEL = {"preset": "tiny", "num_layers": 4}
SIDES: dict[str, dict[str, Any]] = {
    "samples": {"data": {"samples": "documents"}, "sequence": {"length": LONGEST}},
    "rows": {"data": {"isolate_documents": True}},
}


def main() -> None:
    """Write tokens, train the sides in turns, report."""
    arguments = _arguments()
    directory = arguments.directory.resolve()
    load_before = os.getloadavg()
    tokens = directory / "tokens"
    if not tokens.exists():
        _write_documents(tokens, count=arguments.samples)
    counted: dict[str, list[sppo.StepMetrics]] = {side: [] for side in SIDES}
    for turn in range(1, arguments.turns + 1):
        for side in SIDES:
            run = _run(side, directory, row=arguments.row, steps=turn * arguments.steps)
            done = sppo.train(run, progress=False).metrics[-arguments.steps + 1 :]
            counted[side] += done
            rate = statistics.median(step.tokens_per_s for step in done)
            print(f"  turn {turn} {side:<8} {rate:9.0f} tokens/s", flush=True)
    sides = {side: _figures(steps) for side, steps in counted.items()}
    ratio = sides["samples"]["tokens_per_s"] / sides["rows"]["tokens_per_s"]
    lengths = np.diff(open_tokens(tokens).document_offsets)
    pairs = {"samples": _pairs(lengths - 1), "rows": _pairs(_pieces(lengths, row=arguments.row))}
    print(f"samples: {ratio:.3f}x the tokens/s of rows; pairs a token {pairs}")
    report = {
        **provenance(),
        "load_before": load_before,
        "model": MODEL,
        "num_samples": len(lengths),
        "tokens": int(lengths.sum()),
        "row": arguments.row,
        "pairs_per_token": pairs,
        "sides": sides,
        "ratio": ratio,
    }
    if arguments.output is not None:
        write_text(arguments.output, json.dumps(report, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="for tokens and runs; made if missing")
    parser.add_argument("--samples", type=positive, default=100_000, help="documents")
    parser.add_argument("--row", type=positive, default=32768, help="tokens of a row, and a step")
    parser.add_argument("--turns", type=positive, default=5)
    parser.add_argument("--steps", type=positive, default=4, help="of each side and turn")
    parser.add_argument("--output", type=output_file, help="write the figures here as JSON")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"--steps {arguments.steps}: the first is not counted; write 2 or more")
    if arguments.row < LONGEST:
        parser.error(f"--row {arguments.row}: a row holds the longest document, {LONGEST} tokens")
    return arguments


def _write_documents(directory: Path, *, count: int) -> None:
    """Write documents of log-uniform lengths with random tokens."""
    random = np.random.default_rng(0)
    lengths = np.exp(random.uniform(np.log(SHORTEST), np.log(LONGEST), count)).astype(np.int64)
    directory.mkdir(parents=True)
    description = TokenizerDescription(name="ids", end_of_document=None)
    with TokenWriter(directory, vocab_size=256, description=description) as writer:
        for length in lengths.tolist():
            writer.append(random.integers(256, size=length, dtype=np.uint16))
            writer.end_document()
        writer.finish()


def _run(side: str, directory: Path, *, row: int, steps: int) -> sppo.RunConfig:
    """Return the run of a side that ends after `steps` steps."""
    own = SIDES[side]
    per_step = {"tokens_per_step": row} if side == "samples" else {"sequences_per_step": 1}
    return sppo.load_run(
        {
            "model": MODEL,
            "data": {"tokens": directory / "tokens", **own["data"]},
            "sequence": {"length": row, **own.get("sequence", {})},
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


def _pieces(lengths: np.ndarray, *, row: int) -> np.ndarray:
    """Return the lengths of the pieces of documents in rows of the stream."""
    ends = np.cumsum(lengths)
    cuts = np.union1d(ends, np.arange(row, int(ends[-1]), row))
    return np.array([end - begin for begin, end in pairwise([0, *cuts.tolist()])])


def _pairs(lengths: np.ndarray) -> float:
    """Return the pairs of query and key per token."""
    return float((lengths * (lengths + 1) // 2).sum() / lengths.sum())


if __name__ == "__main__":
    main()
