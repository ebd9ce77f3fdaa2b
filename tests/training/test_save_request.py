"""``touch RUN/save``: a running training saves after its current step."""

import io

import pytest
from rich.console import Console

from sppo.config import load_run
from sppo.training.records.step_records import StepRecords
from tests.training.jobs import train_alone, trained

pytestmark = pytest.mark.usefixtures("work")


def saved(output):
    return sorted(path.name for path in (output / "checkpoints").iterdir())


@pytest.fixture
def asks_in_step(monkeypatch):
    """Function that has the file made while the run records a step."""

    def ask(step, output):
        record = StepRecords.record

        def recorded(self, metrics):
            record(self, metrics)
            if metrics.step == step:
                (output / "save").touch()

        monkeypatch.setattr(StepRecords, "record", recorded)

    return ask


@pytest.mark.parametrize(("step", "at_end"), [(2, True), (4, False)])
def test_the_state_after_the_step_is_saved_and_the_file_removed(work, asks_in_step, step, at_end):
    asks_in_step(step, work / "out")
    checkpoint = {"checkpoint.every": 0, "checkpoint.at_end": at_end}
    screen = io.StringIO()
    train_alone(load_run(work / "run.yaml", checkpoint), console=Console(file=screen))
    expected = [f"step_00000{step}", *["step_000004"] * at_end]
    assert saved(work / "out") == expected
    assert not (work / "out/save").exists()
    assert f"saving after step {step}: the file save asked, and is removed" in screen.getvalue()


def test_all_ranks_save_what_a_file_from_before_the_start_asks_for(ranks, work):
    words = ("checkpoint.every=0", "parallel.data_parallel_degree=2", "train.sequences_per_step=2")
    ranks.run(trained, work, (*words, "train.steps=1"), ranks=2)
    (work / "out/save").touch()
    ranks.run(trained, work, (*words, "train.steps=3"), ranks=2)
    assert saved(work / "out") == ["step_000001", "step_000002", "step_000003"]
    assert not (work / "out/save").exists()
