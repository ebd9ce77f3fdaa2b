"""Files and messages at the end of a run."""

import io

import pytest
from rich.console import Console

from sppo.config import load_run
from sppo.report.metrics import JsonlSink, StepMetrics
from sppo.training.preflight import preflight
from sppo.training.records import Baseline, MeasuredBuckets, TrainingOutcome
from sppo.training.report import report
from sppo.training.run_directory import note_configuration
from tests.training.jobs import job_alone, summary
from tests.unpainted import unpainted


@pytest.fixture
def run(work, run_file):
    return load_run(run_file())


def metrics(step):
    return StepMetrics(
        step=step, loss=3.0, grad_norm=1.0, lr=0.1, tokens=64, step_s=0.5, tokens_per_s=128.0
    )


def outcome_of(work, *, first=0, done=4, interrupted_by=None):
    output = work / "out"
    output.mkdir(exist_ok=True)
    note_configuration(load_run("run.yaml"), output)
    sink = JsonlSink(output / "metrics.jsonl", resume_step=first)
    for step in range(first + 1, done + 1):
        sink.write(metrics(step))
    sink.close()
    return TrainingOutcome(
        output,
        Baseline(held_bytes=100),
        first,
        done,
        interrupted_by,
        wall_s=2.0,
        peak_bytes=350,
        phases_s=[(0.1, 0.3, 0.05 * step) for step in range(first, done)],
        buckets=MeasuredBuckets(1, 2, 3, 4, 5),
    )


def told(run, outcome):
    screen = io.StringIO()
    job = job_alone(run, console=Console(file=screen, width=120))
    checked = preflight(job)
    predicted = checked.plan.predicted
    phases_s = (predicted.forward_s, predicted.backward_s, predicted.update_s)
    outcome.planned_phases_s = [phases_s] * len(outcome.phases_s)
    outcome.most_planned = checked.plan.stages[0].memory.device
    with unpainted():
        report(checked, outcome, command="the same command")
    return screen.getvalue()


def test_a_whole_run(work, run):
    text = told(run, outcome_of(work))
    assert "out: metrics.jsonl, run_summary.json, loss.png\n" in text
    assert "stopped" not in text
    found = summary(work / "out")
    assert (found["name"], found["steps"], found["interrupted_by"]) == ("out", 4, None)
    plan = preflight(job_alone(run)).plan
    predicted = plan.stages[0].memory.device
    memory = found["memory_bytes"]
    kv_bytes = predicted.kv_bytes + predicted.kv_gradients_bytes
    assert memory["K/V and gradients"] == {"predicted": kv_bytes, "measured": 4}
    assert memory["all"] == {"predicted": predicted.total_bytes, "measured": 250}
    expected = {"predicted": plan.predicted.backward_s, "measured": 0.3}
    assert found["phases_s"]["backward"] == expected
    assert found["phases_s"]["data and update"]["measured"] == pytest.approx(0.075)


@pytest.mark.parametrize("done", [2, 0])
def test_a_run_that_was_stopped_and_resumed(work, run, done):
    text = told(run, outcome_of(work, done=done, interrupted_by="SIGTERM"))
    left = (
        f"stopped by SIGTERM after step {done} of 4, {4 - done} left; to go on:\nthe same command"
    )
    assert left in text
    assert (work / "out/loss.png").exists() == (done > 0)
    assert summary(work / "out")["interrupted_by"] == "SIGTERM"
    told(run, outcome_of(work, first=done, done=4))
    found = summary(work / "out")
    assert (found["steps"], found["interrupted_by"]) == (4, None)
