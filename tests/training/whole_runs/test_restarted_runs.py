"""Two ranks that ``sppo train`` starts again by itself after one of them was killed."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.chaos.faults import hasten_launcher
from tests.conftest import write_run, write_tokens
from tests.training.jobs import losses


def kill_rank_1(directory, steps):
    """Kill rank 1 of two in a step, and after each further start in the next; hook of a run."""
    from sppo.parallel.job.flight_record import RankProgress

    hasten_launcher()
    note, deaths = RankProgress.note, Path(directory, "deaths")

    def noting(self, *, step, position, **place):
        note(self, step=step, position=position, **place)
        done = deaths.read_text() if deaths.exists() else ""
        is_due = len(done) < len(steps) and step == steps[len(done)] and position == 3
        if is_due and (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "2"):
            deaths.write_text(done + "+")
            os.kill(os.getpid(), signal.SIGKILL)

    RankProgress.note = noting


@pytest.fixture(scope="module")
def train(sppo, tmp_path_factory):
    """Trains six steps of two ranks, of which one is killed in some."""

    def train(*steps, **keys):
        directory = tmp_path_factory.mktemp("run")
        write_tokens(directory / "tokens")
        write_run(
            directory / "run.yaml",
            model={"num_layers": 2},
            parallel={"pipeline_parallel_degree": 2, "timeout_s": 60},
            checkpoint={"every": 2},
            train={"steps": 6, "restarts": 2, **keys},
        )
        hook = __name__, kill_rank_1.__name__, {"directory": str(directory), "steps": steps}
        return sppo("train", "run.yaml", cwd=directory, hook=hook), directory / "out"

    return train


@pytest.fixture(scope="module")
def undisturbed(train):
    ended, output = train()
    assert ended.returncode == 0, ended.stderr
    assert not (output / "failures.jsonl").exists()
    return losses(output)


def test_killed_ranks_start_again_and_train_to_the_same_bits(train, undisturbed):
    ended, output = train(2, 5)
    assert ended.returncode == 0, ended.stderr
    assert losses(output) == undisturbed
    failures = [json.loads(line) for line in (output / "failures.jsonl").read_text().splitlines()]
    assert [(failure["rank"], failure["step"]) for failure in failures] == [(1, 2), (1, 5)]
    parts = ["started", "planned", "loaded", "first step", "noticed", "ended"]
    assert [*failures[1]["seconds"]] == parts
    assert sum(failures[1]["seconds"].values()) < 60


def test_a_device_that_fails_twice_is_left_out_and_the_others_go_on(train, undisturbed):
    ended, output = train(5, 5, shrink=True)
    assert ended.returncode == 0, ended.stderr
    assert [loss for loss, _ in losses(output)] == pytest.approx(
        [loss for loss, _ in undisturbed], rel=1e-5
    )
    said = " ".join(ended.stdout.split())
    assert "a second fault in a row at step 5: goes on without device 1" in said
    assert "degrees all 1, chosen for 1 device; those you write need 2 (train.shrink)" in said
    assert "ranks a step is predicted to take" in said
