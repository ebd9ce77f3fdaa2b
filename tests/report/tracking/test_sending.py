"""Records of a run reach every tracker once, whatever happens to the run."""

import json
import math
from threading import Event

import pytest

from sppo.report.metrics import JsonlSink
from sppo.report.tracking.records import RecordFiles
from sppo.report.tracking.sending import Sending
from sppo.report.tracking.track_file import TRACK_FILE, TrackFile
from sppo.report.tracking.trackers import TRACKERS, TrackedRun
from tests.report.test_metrics import _metrics
from tests.report.tracking.stored import keep_files_in, stored


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's directory, and all that trackers store beside it."""
    keep_files_in(tmp_path, monkeypatch)
    (tmp_path / "out").mkdir()
    return TrackedRun(str(tmp_path / "out"), "sppo", None, "g", ("a",), {"train": {"steps": 9}})


def _record(directory, steps, *, resume_step=0, loss=1.0):
    sink = JsonlSink(directory / "metrics.jsonl", resume_step=resume_step)
    for step in steps:
        sink.write(_metrics(step, loss=math.nan if step == 3 else loss))
    sink.close()


def _validate(directory, *steps):
    with (directory / "validation.jsonl").open("a") as file:
        for step in steps:
            for name in ("held_out", "chat"):
                line = {"step": step, "set": name, "loss": 2.0, "exact": None, "by_position": []}
                file.write(json.dumps(line) + "\n")


def _send(tracker, run, directory):
    sending, ended = Sending(tracker, run, TrackFile(directory)), Event()
    ended.set()
    sending.run(ended)
    assert sending.error is None


@pytest.mark.parametrize("tracker", TRACKERS)
def test_each_step_arrives_once_after_a_rewind(run, tmp_path, tracker):
    pytest.importorskip(tracker)
    directory = tmp_path / "out"
    _record(directory, range(1, 8))
    _validate(directory, 0, 5)
    _send(tracker, run, directory)
    (place,) = json.loads((directory / TRACK_FILE).read_text())[tracker].values()
    _record(directory, range(5, 10), resume_step=4, loss=9.0)
    _validate(directory, 5, 9)
    _send(tracker, run, directory)
    found = stored(tracker, tmp_path)
    assert [step for step, _ in found["train/loss"]] == list(range(1, 10))
    assert [value for _, value in found["speed/tokens_per_s"]] == [41234.0] * 9
    losses = dict(found["train/loss"])
    assert math.isnan(losses.pop(3))
    assert losses == {step: 1.0 if step < 8 else 9.0 for step in losses}
    for name in ("held_out", "chat"):
        assert found[f"validation/{name}/loss"] == [(0, 2.0), (5, 2.0), (9, 2.0)]
    assert "validation/chat/exact" not in found
    assert "speed/mfu" not in found
    (again,) = json.loads((directory / TRACK_FILE).read_text())[tracker].values()
    assert again["id"] == place["id"]


class Failing:
    """Tracker that cannot be reached at first, fails in a step, and then recovers."""

    place, id = "there", "1"

    def __init__(self, run, places):
        self._fail("reach")

    def send(self, records):
        for record in records:
            self._fail(record.step)
        self.got += [record.step for record in records]

    def close(self):
        pass

    def _fail(self, what):
        if what in self.left:
            self.left.remove(what)
            raise ConnectionError(f"no {what}\nand more")


def test_a_tracker_that_fails_is_said_once_and_gets_all_later(run, tmp_path, monkeypatch, caplog):
    got = []
    tracker = type("Tracker", (Failing,), {"left": ["reach", 3], "got": got})
    monkeypatch.setitem(TRACKERS, "mlflow", tracker)
    directory = tmp_path / "out"
    _record(directory, range(1, 6))
    file = TrackFile(directory)
    sending = Sending("mlflow", run, file)
    for _ in range(2):
        sending.send_all(is_last=False)
        assert isinstance(sending.error, ConnectionError)
        assert got == []
    (said,) = caplog.messages
    assert said.startswith("warning: mlflow does not receive the run: no reach; ")
    assert f"sppo track {directory} --to mlflow sends later" in said
    assert file.places("mlflow")["there"].last_steps == {}
    sending.send_all(is_last=True)
    assert sending.error is None
    assert got == [1, 2, 3, 4, 5]


def test_records_are_read_as_soon_as_they_are_whole(tmp_path):
    files, path = RecordFiles(tmp_path), tmp_path / "metrics.jsonl"
    assert list(files.new_records()) == []
    whole = {"step": 1, "loss": 2.0, "norms": {"mlp": {"weight": 3.0}}}
    whole["sources"] = {"books": {"loss": 1.5, "tokens": 8}}
    path.write_text(json.dumps(whole) + "\n{")
    (record,) = files.new_records()
    assert record.values["sources/books/loss"] == 1.5
    assert record.values["sources/books/tokens"] == 8.0
    assert record.values["norms/mlp/weight"] == 3.0
    with path.open("a") as file:
        file.write('"step": 2}\n\0\0\n[]\n')
    assert [record.step for record in files.new_records()] == [2]
    replaced = tmp_path / "new"
    replaced.write_text('{"step": 1}\n')
    replaced.rename(path)
    assert [record.step for record in files.new_records()] == [1]
    assert list(files.new_records()) == []


def test_a_damaged_file_of_what_was_sent(tmp_path):
    (tmp_path / TRACK_FILE).write_text("{")
    with pytest.raises(ValueError, match="track.json is damaged: remove it"):
        TrackFile(tmp_path)
