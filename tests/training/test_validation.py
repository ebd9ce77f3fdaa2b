"""Validation between steps: what it says, what it leaves as it is, the best weights, the end."""

import io
import json
import os
import signal
from itertools import count
from pathlib import Path

import pytest
from rich.console import Console

from sppo.config import load_run
from sppo.engine.engine import Engine
from sppo.report.metrics import read_records
from sppo.report.validation import VALIDATION_FILE, ValidationMetrics
from sppo.training.devices.cpu_device import CpuDevice
from sppo.training.trained_run import trained_run
from sppo.training.trainer import StepLoop
from tests.conftest import LENGTH, call, write_run, write_tokens
from tests.tiers import exhaustive
from tests.training.jobs import evaluate_alone, losses, summary, train_alone

STEPS = 6
DOCUMENTS = (3, 40, 41, LENGTH, 2 * LENGTH + 9, 4 * LENGTH)
SETS = {"held_out": {"tokens": "held", "sequences": 4}, "documents": {"tokens": "documents"}}
SETS["documents"]["samples"] = "documents"


@pytest.fixture
def make(work):
    """Function that writes a run file with a validation, and returns the run."""
    write_tokens(work / "held", num_tokens=9 * LENGTH + 1, seed=1)
    write_tokens(work / "documents", num_tokens=5 * LENGTH, documents=DOCUMENTS, seed=2)

    def run(output="out", *, sections=None, train=None, **validation):
        asked = {"every": 2, "sets": SETS, **validation}
        written = write_run(
            work / "run.yaml",
            train={"steps": STEPS, "output": output, **(train or {})},
            checkpoint={"keep": 2},
            validation=asked,
            **(sections or {}),
        )
        return load_run(written)

    return run


def results(output):
    return read_records(Path(output) / VALIDATION_FILE, ValidationMetrics)


def watched(output):
    return {record.step: record.loss for record in results(output) if record.set == "held_out"}


def train(run, *, reports=False):
    screen = io.StringIO()
    outcome = train_alone(run, console=Console(file=screen, width=200), reports=reports)
    return outcome, screen.getvalue()


def test_losses_of_training_are_those_without_it(make):
    train(make())
    alone = load_run("run.yaml", {"validation": None, "train.output": "alone"})
    train(alone)
    assert losses(Path("out")) == losses(Path("alone"))
    assert not Path("alone", VALIDATION_FILE).exists()


@pytest.mark.parametrize(
    "sections", [{}, *exhaustive({"parallel": {"schedule": "gpipe"}})], ids=str
)
def test_results_are_those_of_an_evaluation(make, sections):
    _, screen = train(make(sections=sections, train={"dtype": "bf16"}))
    assert [(r.step, r.set) for r in results("out")] == [
        (step, name) for step in (0, 2, 4, 6) for name in SETS
    ]
    assert sum(line.startswith("validation ") for line in screen.splitlines()) == 4
    for record in results("out"):
        if record.step not in (4, 6):
            continue
        run = load_run("run.yaml", {"data.tokens": SETS[record.set]["tokens"]})
        if record.set == "documents":
            run = load_run(run, {"data.samples": "documents", "train.samples_per_step": 1})
        found = evaluate_alone(
            run,
            Path(f"out/checkpoints/step_{record.step:06d}"),
            most=SETS[record.set].get("sequences"),
        )
        assert record.loss == found.loss
        assert record.perplexity == found.perplexity
        assert (record.labels, record.sequences) == (found.num_tokens, found.num_sequences)
        assert (record.accuracy, record.exact) == (found.accuracy, found.exact)
        assert [(one.start, one.end, one.loss, one.labels) for one in record.by_position] == [
            (one.start, one.end, one.loss, one.num_tokens) for one in found.by_position
        ]


def test_other_lengths_and_no_beginning(make):
    sets = {"short": {"tokens": "held", "length": 24}, "long": {"tokens": "held", "length": 200}}
    train(make(sets=sets, at_start=False, every=4), reports=True)
    assert {(r.step, r.set, r.labels, r.sequences) for r in results("out")} == {
        (step, *rest) for step in (4, 6) for rest in (("short", 24 * 24, 24), ("long", 400, 2))
    }
    told = trained_run(load_run("run.yaml"))
    assert [record.step for record in told.validations] == [4, 4, 6, 6]
    assert told.best_checkpoint.resolve() == Path("out/checkpoints/step_000006").resolve()
    assert Path("out/loss_by_position.png").is_file()
    assert summary(Path("out"))["validation"]["count"] == 2


def test_best_checkpoint_beside_the_newest(make, monkeypatch):
    """Weights get worse after step 2: their checkpoint stays while newer ones come and go."""
    values = iter([3.0, 2.0, 5.0, float("nan"), 4.0, 2.0])
    monkeypatch.setattr(
        "sppo.training.validation.sums.SetLosses.loss", property(lambda _: next(values))
    )
    sets = {"held_out": SETS["held_out"]}
    train(make(sets=sets, train={"steps": 10}, every=2))
    names = sorted(path.name for path in Path("out/checkpoints").iterdir())
    assert names == ["best", "step_000002", "step_000010"]
    assert os.readlink("out/checkpoints/best") == "step_000002"
    assert "best" not in os.listdir("out")
    assert json.loads(Path("out/checkpoints/best/metadata.json").read_text())["step"] == 2


def test_end_without_improvement(make):
    run = make(stop_after=2, min_improvement=10.0, every=1, keep_best=False)
    outcome, screen = train(run, reports=True)
    assert (outcome.done_steps, outcome.interrupted_by) == (2, None)
    assert (
        "ended early after step 2 of 6: 2 validations without improvement of loss on held_out"
        in screen
    )
    told = summary(Path("out"))
    assert told["stopped_early"].startswith("2 validations without improvement")
    assert told["steps"] == 2
    assert [path.name for path in Path("out/checkpoints").iterdir()] == ["step_000002"]
    again, screen = train(run, reports=True)
    assert again.done_steps == 2
    assert "ended early" in screen
    more, _ = train(make(stop_after=4, min_improvement=10.0, every=1))
    assert more.done_steps == 4
    fewer = {"held_out": {**SETS["held_out"], "sequences": 2}}
    other, _ = train(make(stop_after=4, min_improvement=10.0, every=1, sets=fewer))
    assert other.done_steps == STEPS, "values of another set are no values to improve on"


def test_interrupted_validation_is_made_again(make, monkeypatch):
    """A signal during the validation after step 4: the state is saved, nothing of it recorded."""
    evaluate_together, calls, last = Engine.evaluate_together, count(1), 0

    def stopping(engine, *args, **hooks):
        if next(calls) == last:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate_together(engine, *args, **hooks)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "evaluate_together", stopping)
        train(make("undisturbed"))
        rounds = (next(calls) - 1) // 4
        calls, last = count(1), 2 * rounds + 3
        outcome, _ = train(make("stopped"))
    assert (outcome.interrupted_by, outcome.done_steps) == ("SIGTERM", 4)
    assert {*watched("stopped")} == {0, 2}
    train(make("stopped"))
    assert watched("stopped") == watched("undisturbed")
    assert losses(Path("stopped")) == losses(Path("undisturbed"))


def test_run_that_died_goes_on_with_best_and_counter(make, monkeypatch):
    """Killed between a validation and its checkpoint: validated again, each step once."""
    train(make("undisturbed"))
    save = StepLoop._save

    def dying(loop, **options):
        if loop._outcome.done_steps == 4:
            raise KeyboardInterrupt
        return save(loop, **options)

    with monkeypatch.context() as patched:
        patched.setattr(StepLoop, "_save", dying)
        with pytest.raises(KeyboardInterrupt):
            train(make("killed"))
    assert max(watched("killed")) == 4
    train(make("killed"))
    assert watched("killed") == watched("undisturbed")
    assert len(results("killed")) == 2 * 4


def test_refusals_before_the_start(make, work):
    write_tokens(work / "short", num_tokens=20, documents=range(1, 20))
    make(sets={"a": {"tokens": "nowhere"}, "b": {"tokens": "short"}})
    refused = call("train", "run.yaml")
    assert refused.exit_code == 2
    assert "nowhere: no such directory" in refused.stderr
    assert "short: 20 tokens, but a sequence" in refused.stderr
    make(
        sets={"a": {"tokens": "short", "length": 4}}, sections={"data": {"isolate_documents": True}}
    )
    refused = call("train", "run.yaml")
    assert "validation.sets.a: no label of its first 4 sequences counts" in refused.stderr
    assert not Path("out").exists()


def test_set_that_does_not_fit_is_refused_with_what_would(make, work, monkeypatch):
    write_tokens(work / "long", num_tokens=(64 << 10) + 1)
    monkeypatch.setattr(CpuDevice, "free_bytes", lambda self, local_ranks: 33 << 20)
    sections = {"sequence": {"num_subsequences": 1}}
    make(sets={"long": {"tokens": "long", "length": "64Ki"}}, sections=sections)
    refused = call("train", "run.yaml")
    assert refused.exit_code == 4
    assert "validation.sets.long: a sequence of 65536 tokens needs " in refused.stderr
    assert "write length: " in refused.stderr
    assert not Path("out").exists()
