"""``sppo track``: a run's records sent later, and runs whose trackers are not installed."""

import json
import os
import signal
import sys

import pytest

from sppo.config.track import TrackConfig
from sppo.output_file import write_json
from sppo.report.metrics import JsonlSink
from sppo.training.records.tracking import SendingProcess
from tests.conftest import call, refuse, succeed, tree, write_run, write_tokens
from tests.report.test_metrics import _metrics
from tests.report.tracking.stored import keep_files_in, stored


@pytest.fixture
def out(tmp_path, monkeypatch):
    """Directory of a run of three steps, whose run file names a project."""
    keep_files_in(tmp_path, monkeypatch)
    out = tmp_path / "out"
    out.mkdir()
    write_json(out / "run.json", {"train": {"steps": 3}, "track": {"project": "long"}})
    _record(out, 1, 2, 3)
    return out


def _record(out, *steps):
    sink = JsonlSink(out / "metrics.jsonl", resume_step=steps[0] - 1)
    for step in steps:
        sink.write(_metrics(step))
    sink.close()


def test_what_was_not_sent_yet_is_sent_later(out, tmp_path):
    pytest.importorskip("tensorboard")
    assert "tensorboard: 3 records sent" in succeed("track", "out", "--to", "tensorboard")
    _record(out, 3, 4)
    assert "tensorboard: 1 record sent" in succeed("track", "out", "--to", "tensorboard")
    found = stored("tensorboard", tmp_path)
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4]


def test_another_project_gets_all_of_the_run(out):
    pytest.importorskip("trackio")
    for words, sent in ((("name=first",), 3), ((), 0), (("project=other",), 3)):
        assert f"trackio: {sent} record" in succeed("track", "out", "--to", "trackio", *words)
    places = json.loads((out / "track.json").read_text())["trackio"]
    assert [place.partition(" at ")[0] for place in places] == ["long", "other"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere", "--to", "wandb"], "nowhere: no run.json there"),
        (["out"], "out: the run names no tracker; give --to TRACKER"),
        (
            ["out", "--to", "wandbb"],
            "trackio, mlflow. Did you mean 'wandb'?",
        ),
        (["out", "--to", "mlflow", "nme=x"], "Did you mean 'name'?"),
        (["out", "--to", "mlflow"], "mlflow needs the package of this name: pip install 'sppo[mlf"),
    ],
)
def test_what_cannot_be_sent(out, monkeypatch, words, says):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    before = tree(out)
    assert says in refuse("track", *words)
    assert tree(out) == before


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tensorboard", "tensorboard does not receive the run: "),
        ("track.json", "nothing is sent to tensorboard: {}/track.json is damaged: remove it"),
    ],
)
def test_a_failure_is_the_exit_code(out, name, says):
    pytest.importorskip("tensorboard")
    (out / name).write_text("no events, and no JSON")
    result = call("track", "out", "--to", "tensorboard")
    assert result.exit_code == 1
    assert says.format(out) in result.output


def test_a_package_that_is_not_there_is_an_error_before_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "trackio", None)
    write_tokens(tmp_path / "tokens")
    write_run(tmp_path / "run.yaml")
    error = refuse("train", "run.yaml", "track.to=[tensorboard,trackio]")
    assert "trackio needs the package of this name: pip install 'sppo[trackio]'" in error
    assert not (tmp_path / "out").exists()


def test_a_process_that_was_ended_is_said(out):
    said = []
    sending = SendingProcess(out, TrackConfig(), ["mlflow"], say=lambda _, text: said.append(text))
    os.kill(sending.pid, signal.SIGKILL)
    assert sending.end() == -signal.SIGKILL
    assert said == [
        "warning: the process that sends to trackers was ended by signal 9; "
        f"sppo track {out} sends later what is missing"
    ]
