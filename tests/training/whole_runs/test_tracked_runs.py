"""A run with trackers: the same losses, and each step at each tracker once, however it goes."""

import shutil
import signal

import pytest

from sppo.report.tracking.trackers import TRACKERS
from tests.conftest import LENGTH, write_run, write_tokens
from tests.report.tracking.stored import keep_files_in, stored
from tests.tiers import default_of
from tests.training.forked_sppo import in_step
from tests.training.jobs import records

STEPS = 8


@pytest.fixture
def directory(tmp_path):
    write_tokens(tmp_path / "tokens", num_tokens=4 * LENGTH + 1)
    validation = {"every": 4, "sets": {"same": {"tokens": "tokens"}}}
    sections = {"checkpoint": {"every": 2}, "validation": validation}
    write_run(tmp_path / "run.yaml", train={"steps": STEPS}, **sections)
    return tmp_path


@pytest.fixture
def train(sppo, directory):
    """Function that trains in the directory; trackers store there what they get."""
    files = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(directory / "trackio")}

    def run(*words, env=files, hook=None):
        return sppo("train", "run.yaml", *words, cwd=directory, env=env, hook=hook)

    return run


@pytest.mark.parametrize("tracker", default_of(TRACKERS, "tensorboard"))
def test_killed_rewound_and_resumed(directory, train, tracker, monkeypatch):
    pytest.importorskip(tracker)
    keep_files_in(directory, monkeypatch)
    assert train("train.output=plain").returncode == 0
    killed = train(f"track.to={tracker}", hook=in_step(7, [signal.SIGKILL], action=5))
    assert killed.returncode == -signal.SIGKILL
    shutil.rmtree(directory / "out/checkpoints/step_000006")
    again = train(f"track.to={tracker}")
    assert again.returncode == 0, again.stderr
    assert "going on after step 4" in again.stdout
    ours, theirs = (
        [(record["step"], record["loss"]) for record in records(directory / name)]
        for name in ("out", "plain")
    )
    assert ours == theirs
    found = stored(tracker, directory)
    assert [step for step, _ in found["train/loss"]] == [step for step, _ in ours]
    # TensorBoard's numbers have 32 bits.
    assert dict(found["train/loss"]) == pytest.approx(dict(ours), rel=1e-6)
    assert [step for step, _ in found["validation/same/perplexity"]] == [0, 4, STEPS]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("tracker", "env", "says"),
    [
        (
            "wandb",
            {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40},
            "offline, in files that wandb sync sends later",
        ),
        (
            "mlflow",
            {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"},
            "--to mlflow sends later what is missing",
        ),
    ],
)
def test_nobody_answers_for_a_tracker(directory, train, tracker, env, says):
    pytest.importorskip(tracker)
    ended = train(f"track.to={tracker}", env=env)
    assert ended.returncode == 0
    assert (ended.stdout + ended.stderr).count(says) == 1
    assert len(records(directory / "out")) == STEPS
