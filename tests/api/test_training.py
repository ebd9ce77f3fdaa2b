"""Training and evaluation through ``import sppo``, in one process and several."""

import importlib
import json
import math
import os
import signal
import threading
from pathlib import Path

import pytest

import sppo
from tests.conftest import succeed
from tests.training.test_planning_ahead import each_step
from tests.unpainted import unpainted

TWO = {"model.num_layers": 2, "parallel.pipeline_parallel_degree": 2}


@pytest.fixture
def run(work):
    return sppo.load_run(work / "run.yaml")


def test_trains_as_the_command_does(work, run, capsys):
    with unpainted():
        succeed("train", "run.yaml", "train.output=by_command")
        result = sppo.train(run, progress=False)
    assert capsys.readouterr().out == ""
    lines = (work / "by_command/metrics.jsonl").read_text().splitlines()
    assert result.losses == [json.loads(line)["loss"] for line in lines]
    assert (result.steps, result.interrupted_by) == (4, None)
    assert result.checkpoint is not None
    assert result.checkpoint.name == "step_000004"
    assert result.summary.steps == 4
    assert (
        result.plan.program_digest
        == json.loads((result.output / "plan.json").read_text())["program_digest"]
    )


def test_follows_a_plan(work, run):
    plan = sppo.solve(sppo.load_run(work / "run.yaml", {"sequence.num_subsequences": 3}))
    chosen = sppo.load_run(work / "run.yaml", {"sequence.num_subsequences": 3})
    with unpainted():
        assert sppo.train(chosen, plan, progress=False).plan == plan
    with pytest.raises(ValueError, match="the plan was made for another run"):
        sppo.train(run, plan, progress=False)


def test_ranks_are_started_and_learn_the_same(work, capfd):
    two = sppo.load_run(work / "run.yaml", {**TWO, "train.output": "two"})
    one = sppo.load_run(work / "run.yaml", {"model.num_layers": 2})
    with unpainted():
        alone = sppo.train(one, progress=False)
    result = sppo.train(two)
    assert result.losses == pytest.approx(alone.losses, rel=1e-5)
    out = capfd.readouterr().out
    assert out.startswith("start     2 ranks on this machine (pipeline 2): ")
    assert "step 4/4" in out


def test_the_exit_code_of_the_ranks_is_told(work, monkeypatch):
    monkeypatch.setattr("sppo.api.train_on_ranks", lambda *_, **__: 4)
    with pytest.raises(sppo.RunFailedError, match="exit code 4") as caught:
        sppo.train(sppo.load_run(work / "run.yaml", TWO), progress=False)
    assert caught.value.exit_code == 4


def test_only_the_main_thread_trains(run):
    found = []

    def attempt():
        with pytest.raises(ValueError, match="main thread"):
            sppo.train(run)
        found.append(True)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert found == [True]
    assert not Path(run.train.output).exists()


def test_an_interrupt_saves_and_is_told(work):
    def interrupts(step):
        if step == 10:  # a few of them warm up
            os.kill(os.getpid(), signal.SIGINT)

    run = sppo.load_run(work / "run.yaml", {"train.steps": 100000})
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with unpainted(), each_step(interrupts):
        done = sppo.train(run, progress=False)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert done.interrupted_by == "SIGINT"
    assert 0 < done.steps < 10
    assert sppo.trained_run(run).interrupted_by is None
    assert done.checkpoint is not None
    assert done.checkpoint.name == f"step_{done.steps:06d}"


def test_evaluates_as_the_command_does(run):
    with unpainted():
        sppo.train(run, progress=False)
    told = json.loads(succeed("eval", "run.yaml", "--json", "--sequences", "2"))
    seen = []
    found = sppo.evaluate(run, sequences=2, on_sequence=lambda done, of: seen.append((done, of)))
    assert (found.loss, found.step, seen) == (told["loss"], 4, [(1, 2), (2, 2)])
    assert math.isfinite(found.perplexity)
    initial = sppo.evaluate(run, initial=True, sequences=1)
    assert initial.step == 0


def test_evaluation_refuses_bad_requests(run):
    with pytest.raises(ValueError, match="at least one"):
        sppo.evaluate(run, sequences=0)


def test_the_example_of_an_own_loop_learns(capsys, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs/examples")
    example = importlib.import_module("own_loop")
    monkeypatch.setattr(example, "LENGTH", 512)
    example.main()
    losses = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 1
