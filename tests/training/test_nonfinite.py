"""Steps with NaN or infinity, or without labels: named, skipped, counted, and never saved."""

import errno
import io
import json
import math

import pytest
import torch
from rich.console import Console

from sppo.checkpoint.checkpoint import read_weights
from sppo.config import load_run
from sppo.model.huggingface.writing import save_hf_weights
from sppo.model.initialize import initial_weights
from sppo.optim import sharded_state as sharded_state
from sppo.optim.adamw import AdamW
from sppo.parallel.host_collectives import HostCollectives
from sppo.report.display import TrainingDisplay
from sppo.training import trainer
from sppo.training.interruption import NonFiniteError
from sppo.training.trainer import StepLoop
from sppo.training.watch.computed import StepSums
from sppo.training.watch.nonfinite import NonFiniteGuard
from tests.conftest import LENGTH, RUN, call, refuse, tree, write_tokens
from tests.make import make_run
from tests.training.jobs import records, summary, train_alone

GRADIENTS = {"a": torch.ones(3), "b": torch.ones(2, 2)}


def guard(**keys):
    run = make_run(train={"max_nonfinite_steps": 2, **keys})
    return NonFiniteGuard(run, HostCollectives(None))


def judge(guard, *, step=1, loss=1.0, norm=1.0, gradients=GRADIENTS):
    return guard.problem(step, StepSums(1, loss, norm, gradients))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_report_names_step_values_and_parameters(value):
    bad = {**GRADIENTS, "b": torch.tensor([[1.0, value], [0.0, 0.0]])}
    report = judge(guard(), step=7, loss=2.5, norm=value, gradients=bad)
    assert report == (
        f"step 7: loss 2.5, gradient norm {value}; not finite in the gradients of b. "
        "The update is skipped"
    )
    many = {f"p{i}": torch.tensor([value]) for i in range(10)}
    assert "of p0, p1, p2, p3 and 6 more." in judge(guard(), norm=value, gradients=many)
    large = {"a": torch.full((4,), 3e38)}
    assert "every gradient is finite" in judge(guard(), norm=value, gradients=large)
    assert f"loss {value}" in judge(guard(), loss=value)


def test_only_steps_in_a_row_count():
    counting = guard()
    for _ in range(5):
        assert judge(counting, norm=math.nan)
        assert judge(counting, norm=math.nan)
        assert counting.failing
        assert judge(counting) is None
        assert not counting.failing
    judge(counting, norm=math.nan)
    judge(counting, norm=math.nan)
    with pytest.raises(NonFiniteError, match="3 such steps in a row"):
        judge(counting, norm=math.nan)


# In the loop


@pytest.fixture
def bad_steps(work, monkeypatch):
    """Put step numbers in here (from 1 in this process): their gradients are not finite."""
    bad = set()
    norm, run_step, done = sharded_state.global_norm, trainer.run_step, 0

    def counted(*arguments, **how):
        nonlocal done
        done += 1
        return run_step(*arguments, **how)

    def poisoned(gradients, **how):
        if done in bad:
            gradients["layers.0.q.weight"][3, 2] = math.nan
        return norm(gradients, **how)

    monkeypatch.setattr(trainer, "run_step", counted)
    monkeypatch.setattr(sharded_state, "global_norm", poisoned)
    return bad


@pytest.fixture
def changed(work, monkeypatch):
    """Whether each step changed the optimizer's state."""
    seen, step = [], StepLoop._step

    def remember(loop, number, *rest):
        def copy():
            return {name: t.clone() for name, t in loop._state.optimizer.state().items()}

        before = copy()
        metrics = step(loop, number, *rest)
        seen.append(any(not torch.equal(before[name], t) for name, t in copy().items()))
        return metrics

    monkeypatch.setattr(StepLoop, "_step", remember)
    return seen


def skipped_lines(run):
    """What a run prints of skipped updates, and its records."""
    screen = io.StringIO()
    outcome = train_alone(run, console=Console(file=screen, width=500), reports=True)
    return [line for line in screen.getvalue().splitlines() if "skipped" in line], records(
        outcome.output
    )


def test_a_skipped_step_changes_nothing(work, run_file, bad_steps, changed):
    bad_steps.update({2, 3})
    run = load_run(run_file(train={"steps": 5, "dtype": "bf16"}))
    said, steps = skipped_lines(run)
    assert changed == [True, False, False, True, True]
    assert said[0].startswith("step 2: loss 3.")
    assert "not finite in the gradients of layers.0.q.weight. The update is skipped" in said[0]
    assert "(not finite: update skipped)" in said[1]
    assert "5 (2 skipped)" in said[-1]
    assert [step["skipped"] for step in steps] == [False, True, True, False, False]
    assert steps[1]["grad_norm"] is None
    assert summary(work / "out")["skipped_steps"] == 2


def test_too_many_end_the_run(work, bad_steps):
    bad_steps.update(range(5, 100))
    words = ("train.steps=20", "checkpoint.every=1", "train.max_nonfinite_steps=2")
    result = call("train", "run.yaml", *words)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("error: step 7: loss 3.")
    assert len(result.stderr.splitlines()) == 1
    names = sorted(path.name for path in (work / "out/checkpoints").iterdir())
    assert names == ["step_000002", "step_000003", "step_000004"]  # from before, all of them


def test_the_run_can_go_on_where_it_stopped(work, bad_steps):
    bad_steps.add(5)
    words = ("train", "run.yaml", "train.steps=6", "checkpoint.every=2")
    assert call(*words, "train.nonfinite=stop").exit_code == 1
    before = tree(work / "out/checkpoints")
    result = call(*words)  # the poison was for the fifth step of the process
    assert result.exit_code == 0
    after = tree(work / "out/checkpoints")
    assert {name: after[name] for name in before} == before
    assert read_weights("out")[0].step == 6


def test_a_run_without_checkpoints_keeps_what_it_has(work, bad_steps):
    bad_steps.update(range(4, 100))
    result = call("train", "run.yaml", "train.steps=20", "train.nonfinite=stop")
    assert result.exit_code == 1
    checkpoint, weights = read_weights("out")
    assert checkpoint.step == 3
    assert all(weight.isfinite().all() for weight in weights.values())


def test_weights_that_blew_up_are_never_saved(work, bad_steps, monkeypatch):
    update, done = AdamW.step, 0

    def blow_up(optimizer, gradients, *, lr):
        nonlocal done
        done += 1
        update(optimizer, gradients, lr=lr)
        if done == 3:
            optimizer.state()["model.head.weight"][0, 0] = math.inf

    monkeypatch.setattr(AdamW, "step", blow_up)
    monkeypatch.setattr(trainer, "warm_up", lambda run, **_: None)  # a step of another model
    result = call("train", "run.yaml", "train.steps=20", "checkpoint.every=1")
    assert result.exit_code == 1
    assert "the state after step 3 is not saved; not finite: model.head.weight" in result.stdout
    names = sorted(path.name for path in (work / "out/checkpoints").iterdir())
    assert names == ["step_000001", "step_000002"]


def test_a_skipped_step_that_cannot_be_told_ends_the_run_saved(work, bad_steps, monkeypatch):
    say = TrainingDisplay.say

    def full(display, text):
        if "The update is skipped" in text:
            raise OSError(errno.ENOSPC, "No space left on device")
        say(display, text)

    monkeypatch.setattr(TrainingDisplay, "say", full)
    bad_steps.add(2)
    result = call("train", "run.yaml")
    assert result.exit_code == 4
    said = "error: standard output: No space left on device; the state after step 2 of 4 is saved"
    assert said in result.stderr
    assert (work / "out/checkpoints/step_000002").is_dir()


def test_a_run_whose_last_state_is_not_finite_does_not_end_well(work, bad_steps, monkeypatch):
    update = AdamW.step

    def blow_up(optimizer, gradients, *, lr):
        update(optimizer, gradients, lr=lr)
        optimizer.state()["model.head.weight"][0, 0] = math.inf

    monkeypatch.setattr(AdamW, "step", blow_up)
    monkeypatch.setattr(trainer, "warm_up", lambda run, **_: None)
    result = call("train", "run.yaml", "train.max_nonfinite_steps=1000000")
    assert result.exit_code == 1
    assert "error: the state after step 4 is not saved; not finite: model.head" in result.stderr
    assert "earlier checkpoints are untouched" in result.stderr
    assert not (work / "out/checkpoints").exists()


@pytest.mark.parametrize(
    ("value", "frozen"),
    [(math.nan, False), (math.inf, False), (-math.inf, False), (math.nan, True)],
)
def test_weights_that_are_not_finite_are_refused_before_the_start(work, value, frozen):
    run = load_run("run.yaml")
    weights = initial_weights(run.model, seed=0)
    weights["embed.weight"][3, 2] = value
    weights["embed.weight"][5] = value
    save_hf_weights(work / "weights", weights, run.model, dtype="fp32")
    adapter = {"adapter": {"rank": 1}} if frozen else {}
    (work / "hf.yaml").write_text(json.dumps({**RUN, "model": {"from_hf": "weights"}, **adapter}))
    result = call("train", "hf.yaml")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(
        "error: weights: not finite: model.embed.weight; training would keep it"
    )
    assert sorted(path.name for path in (work / "out").iterdir()) == [".lock"]


# Without labels: every document has one token, and a first token is nobody's label


def short_documents(work, run_file, starts):
    write_tokens(work / "short", documents=starts)
    data = {"tokens": "short", "shuffle": False, "isolate_documents": True}
    return load_run(run_file(data=data, train={"steps": 4, "dtype": "bf16"}))


def test_a_step_without_labels_is_skipped(work, run_file, changed):
    run = short_documents(work, run_file, range(LENGTH + 1, 2 * LENGTH + 1))
    said, steps = skipped_lines(run)
    assert changed == [True, False, True, True]
    assert said[0].startswith("step 2: no label counts in sequence 1 of short: all documents")
    assert "loss none (no label counts: update skipped)" in said[1]
    assert "4 (1 skipped)" in said[-1]
    assert [step["labels"] for step in steps] == [LENGTH, 0, LENGTH, LENGTH]
    assert [step["skipped"] for step in steps] == [False, True, False, False]
    assert [step["loss"] is None for step in steps] == [False, True, False, False]
    told = summary(work / "out")
    assert told["skipped_steps"] == 1
    assert told["loss_last"] > 0
    assert (work / "out/loss.png").exists()
    assert call("train", "run.yaml", "train.steps=6").exit_code == 0


@pytest.mark.parametrize("end", [4 * LENGTH, 20 * LENGTH])
def test_a_run_without_any_label_is_refused_before_it_starts(work, run_file, end):
    short_documents(work, run_file, range(1, end + 1))
    message = refuse("train", "run.yaml")
    assert "no label counts in sequence 0 of short" in message
    assert "and so it is in every step" in message
    assert not (work / "out").exists()
