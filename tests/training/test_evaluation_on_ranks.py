"""Evaluations with the degrees of a run: the losses are those of one process."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sppo.config import load_run
from sppo.training.evaluation.evaluated_run import evaluate
from sppo.training.evaluation.scoring import DocumentScore, score
from sppo.training.job import mesh_shape
from tests.conftest import LENGTH, write_run, write_tokens
from tests.tiers import default_of, exhaustive
from tests.training.jobs import job_alone, job_of_rank, train_alone

MODEL = {"num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "tie_embeddings": True}
STARTS = (2, 42, 45, 110, 115, 245, 246, 249, 282, 299, 363, 372, 462, 464, 600)
DOCUMENTS = {"data.samples": "documents", "train.samples_per_step": 8}
DEGREES = ("data_parallel_degree", "pipeline_parallel_degree", "sequence_parallel_degree")
ON_DISK = {
    "parallel.virtual_stages": 2,
    **{f"state.{part}": "disk" for part in ("weights", "gradients", "optimizer")},
}
LAYOUTS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "all axes": ((2, 2, 2), {}),
    "documents, all axes": ((2, 2, 2), DOCUMENTS),
    # Training refuses it: its replicas run different programs.
    "documents, weights sharded": ((2, 1, 1), {**DOCUMENTS, "parallel.zero": 3}),
    "looped": ((1, 2, 1), {"parallel.virtual_stages": 2, "parallel.schedule": "looped_bfs"}),
    "shared units": ((1, 2, 1), {"parallel.multiplexed": "on"}),
    "heads and widths sharded": ((1, 1, 2), {"parallel.sequence_parallel": "megatron"}),
    "weights on disk, sharded": ((1, 1, 2), {**ON_DISK, "parallel.zero": 3}),
}
DEFAULT = ("heads and widths sharded", "weights on disk, sharded")
"""Scores meet all axes, and validations of whole runs the looped order and weights sharded."""


def run_of(values: dict[str, Any]):
    return load_run(Path("run.yaml")).with_values(values)


def evaluate_rank(rank: int, directory: Path, values: dict[str, Any]):
    """One rank of an evaluation, in the rank pool, and the samples that it said were done."""
    with contextlib.chdir(directory):
        told: list[tuple[int, int]] = []
        job = job_of_rank(run_of(values), rank)
        found = evaluate(job, Path("out"), most=None, on_sequence=lambda *pair: told.append(pair))
        return found, told


def score_rank(rank: int, directory: Path, values: dict[str, Any]):
    """One rank of a scoring: the scores that it is told, and the numbers of documents done."""
    with contextlib.chdir(directory):
        run = run_of(values)
        job = job_alone(run) if mesh_shape(run).num_ranks == 1 else job_of_rank(run, rank)
        scores: list[DocumentScore] = []
        told: list[tuple[int, int]] = []
        score(
            job,
            Path("out"),
            on_document=scores.append,
            on_done=lambda *pair: told.append(pair),
        )
        return scores, told


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A run that was trained for two steps, and tokens of documents of many lengths."""
    directory = tmp_path_factory.mktemp("evaluated")
    write_tokens(directory / "tokens", num_tokens=11 * LENGTH + 1, documents=STARTS)
    (directory / "spill").mkdir()
    train = {"sequences_per_step": 2, "steps": 2}
    sections = {"model": MODEL, "activations": {"disk": "spill"}, "optimizer": {"lr": 0.1}}
    write_run(directory / "run.yaml", train=train, **sections)
    with contextlib.chdir(directory):
        train_alone(run_of({}))
    return directory


@pytest.mark.parametrize("layout", default_of(LAYOUTS, *DEFAULT))
def test_as_one_process_says(directory, ranks, layout):
    degrees, values = LAYOUTS[layout]
    with contextlib.chdir(directory):
        job = job_alone(run_of({key: values[key] for key in DOCUMENTS if key in values}))
        alone = evaluate(job, Path("out"), most=None, on_sequence=lambda *pair: None)
    written = {f"parallel.{name}": n for name, n in zip(DEGREES, degrees, strict=True)}
    count = degrees[0] * degrees[1] * degrees[2]
    found = ranks.run(evaluate_rank, directory, {**written, **values}, ranks=count)
    for own, told in found:
        assert told[-1] == (alone.num_sequences, alone.num_sequences)
        assert own.loss == pytest.approx(alone.loss, rel=1e-6)
        nothing = {"loss": 0.0, "perplexity": 0.0, "by_position": ()}
        assert replace(own, **nothing) == replace(alone, **nothing)
        for ours, theirs in zip(own.by_position, alone.by_position, strict=True):
            assert ours.num_tokens == theirs.num_tokens
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
    assert len({own.loss for own, _ in found}) == 1


@pytest.mark.exhaustive
def test_the_command_starts_the_ranks(directory, sppo):
    words = ("eval", "run.yaml", "--json")
    alone, found = (
        json.loads(sppo(*words, f"parallel.pipeline_parallel_degree={n}", cwd=directory).stdout)
        for n in (1, 2)
    )
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert found["weights_from"] == alone["weights_from"]


@pytest.mark.parametrize("degrees", [(2, 2, 2), *exhaustive((3, 1, 1), (1, 2, 2))])
def test_scores_are_those_of_one_process_in_order(directory, ranks, degrees):
    whole = {**DOCUMENTS, "sequence.longer": "refuse", "sequence.length": 2 * LENGTH + 8}
    alone, _ = score_rank(0, directory, whole)
    written = {f"parallel.{name}": n for name, n in zip(DEGREES, degrees, strict=True)}
    count = degrees[0] * degrees[1] * degrees[2]
    (found, told), *others = ranks.run(score_rank, directory, {**whole, **written}, ranks=count)
    assert all(scores == [] for scores, _ in others)
    documents = len(STARTS) + 1
    assert [own.document for own in found] == [*range(documents)]
    assert told[-1] == (documents - 1, documents - 1)  # one document has a single token
    for own, other in zip(found, alone, strict=True):
        assert own.positions_L.tolist() == other.positions_L.tolist()
        assert own.log_probabilities_L == pytest.approx(other.log_probabilities_L, abs=1e-5)
        assert own.correct_L.tolist() == other.correct_L.tolist()
