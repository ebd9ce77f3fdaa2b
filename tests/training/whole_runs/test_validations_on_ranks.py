"""Validation on several ranks and in other tiers: results of one rank, and no trace in training.

Weights of a run on several ranks differ from those of one rank by rounding, so the results after
steps are compared with an evaluation of the same checkpoint by one process.
"""

import contextlib
import os
import signal
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from sppo.config import load_run
from sppo.engine.engine import Engine
from sppo.report.metrics import read_records
from sppo.report.validation import VALIDATION_FILE, ValidationMetrics
from tests.conftest import LENGTH, write_run, write_tokens
from tests.fake_cuda import fake_gpu, steps_lock_nothing
from tests.tiers import default_of
from tests.training.jobs import evaluate_alone, losses, train_alone, train_rank, trained
from tests.training.whole_runs.test_parallel_runs import MEGATRON, MODEL, OPTIMIZER, STATE

STEPS = 2
SETS = {
    "stream": {"tokens": "held", "sequences": 5},
    "long": {"tokens": "held", "sequences": 1, "length": 3 * LENGTH - 7},
    "documents": {"tokens": "documents", "samples": "documents", "length": 2 * LENGTH},
}
DOCUMENTS = (3, 40, 41, LENGTH, 2 * LENGTH + 9, 4 * LENGTH + 20)
STAGES = {"parallel.virtual_stages": 2}
LAYOUTS = {
    "pipeline, ulysses": ((1, 2, 2), {"sequence.num_subsequences": 1}),
    "megatron": ((1, 1, 2), MEGATRON),
    "zero 3": ((2, 1, 1), {"parallel.zero": 3}),
    "looped, K/V on a disk": (
        (1, 2, 1),
        {**STAGES, **{"activations.disk": "spill", "activations.kv": "offload"}},
    ),
    "all axes, MSP, zero 2": ((2, 2, 2), {"parallel.multiplexed": "on", "parallel.zero": 2}),
    "pipeline, megatron, zero 3": ((2, 2, 2), {**MEGATRON, "parallel.zero": 3, **STAGES}),
    "state on a disk, zero 3": ((1, 1, 2), {**STATE, "parallel.zero": 3, **STAGES}),
    "zero bubble": ((1, 2, 1), {"parallel.schedule": "zb_h1", "sequence.num_subsequences": 1}),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Directory with token data and a run file."""
    found = tmp_path_factory.mktemp("validations")
    write_tokens(found / "tokens")
    write_tokens(found / "held", num_tokens=9 * LENGTH + 1, seed=1)
    write_tokens(found / "documents", num_tokens=5 * LENGTH, documents=DOCUMENTS, seed=2)
    (found / "spill").mkdir()
    write_run(
        found / "run.yaml",
        model={**MODEL, "num_layers": 4},
        optimizer=OPTIMIZER,
        train={"steps": STEPS, "sequences_per_step": 2, "dtype": "fp32"},
        validation={"every": 2, "sets": SETS},
    )
    return found


def run_on(ranks, place, name, output, *more):
    (data, pipeline, sequence), keys = LAYOUTS[name]
    keys = {
        "parallel.data_parallel_degree": data,
        "parallel.pipeline_parallel_degree": pipeline,
        "parallel.sequence_parallel_degree": sequence,
        "train.output": output,
        **keys,
    }
    words = [*(f"{key}={value}" for key, value in keys.items()), *more]
    ranks.run(trained, place, words, ranks=data * pipeline * sequence)


def results(output):
    records = read_records(output / VALIDATION_FILE, ValidationMetrics)
    return {(record.step, record.set): record for record in records}


@pytest.fixture(scope="module")
def by_one_process(place):
    """Function that evaluates a set with a checkpoint, or the initial weights, by one process."""

    @cache
    def evaluated(name, source):
        own = SETS[name]
        words = {"data.tokens": own["tokens"], "sequence.length": own.get("length", LENGTH)}
        words |= {"validation": None, "train.sequences_per_step": 1, "sequence.num_subsequences": 3}
        if "samples" in own:
            words |= {"data.samples": "documents", "train.samples_per_step": 1}
        with contextlib.chdir(place):
            return evaluate_alone(
                load_run("run.yaml", words),
                None if source is None else Path(source),
                most=own.get("sequences"),
            )

    return evaluated


@pytest.mark.parametrize(
    "name", default_of(LAYOUTS, "pipeline, ulysses", "zero 3", "looped, K/V on a disk")
)
def test_results_are_those_of_one_process(ranks, place, by_one_process, name):
    output = name.replace("/", "")
    run_on(ranks, place, name, output)
    run_on(ranks, place, name, f"{output} alone", "validation=null")
    assert losses(place / output) == losses(place / f"{output} alone")
    found = results(place / output)
    assert [*found] == [(step, own) for step in (0, STEPS) for own in SETS]
    for (step, own), record in found.items():
        source = None if step == 0 else f"{output}/checkpoints/step_{step:06d}"
        expected = by_one_process(own, source)
        assert record.loss == pytest.approx(expected.loss, rel=1e-6)
        assert (record.labels, record.sequences) == (expected.num_tokens, expected.num_sequences)
        for mine, theirs in zip(record.by_position, expected.by_position, strict=True):
            assert (mine.start, mine.end, mine.labels) == (
                theirs.start,
                theirs.end,
                theirs.num_tokens,
            )
            assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
    assert list((place / "spill").iterdir()) == []


@pytest.mark.parametrize("tier", default_of(("device", "host"), "host"))
def test_validation_beside_offloading_on_a_gpu(place, monkeypatch, tier):
    """Between steps that offload and stream, the weights that are evaluated are those trained."""
    monkeypatch.chdir(place)
    moved = {f"state.{part}": tier for part in ("weights", "gradients", "optimizer")}
    keys = {"activations.policy": "offload_all", "parallel.virtual_stages": 2, **moved}
    keys |= {"activations.kv": "offload", "train.output": f"gpu {tier}"}
    with fake_gpu() as (device, runtime), steps_lock_nothing(runtime):
        train_alone(load_run("run.yaml", keys), device=device)
        alone = {**keys, "validation": None, "train.output": f"gpu {tier} alone"}
        train_alone(load_run("run.yaml", alone), device=device)
    assert losses(place / f"gpu {tier}") == losses(place / f"gpu {tier} alone")
    train_alone(load_run("run.yaml", {"train.output": f"cpu {tier}"}))
    on_gpu, on_cpu = (results(place / f"{kind} {tier}") for kind in ("gpu", "cpu"))
    assert [*on_gpu] == [*on_cpu]
    for key, record in on_gpu.items():
        assert record.loss == pytest.approx(on_cpu[key].loss, rel=1e-6)


def stopped_in_a_validation(rank, directory, arguments):
    """One rank of a run; rank 1 gets a signal in the validation after the last step."""
    evaluate_together, trained = Engine.evaluate_together, Engine.accumulate
    steps = 0

    def accumulate(engine, *args, **hooks):
        nonlocal steps
        steps += 1
        return trained(engine, *args, **hooks)

    def stopping(engine, *args, **hooks):
        if rank == 1 and steps == STEPS:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate_together(engine, *args, **hooks)

    with (
        mock.patch.object(Engine, "accumulate", accumulate),
        mock.patch.object(Engine, "evaluate_together", stopping),
    ):
        _, outcome = train_rank(rank, directory, arguments)
    return outcome.interrupted_by, outcome.done_steps


@pytest.mark.exhaustive
def test_signal_of_one_rank_ends_the_validation_of_all(ranks, place):
    words = ["parallel.pipeline_parallel_degree=2", "train.output=stopped"]
    ended = ranks.run(stopped_in_a_validation, place, words, ranks=2)
    assert ended == [("SIGTERM", STEPS)] * 2
    assert {step for step, _ in results(place / "stopped")} == {0}
    assert [path.name for path in (place / "stopped/checkpoints").iterdir()] == ["step_000002"]
    ranks.run(trained, place, words, ranks=2)
    assert {step for step, _ in results(place / "stopped")} == {0, STEPS}
