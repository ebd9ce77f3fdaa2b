"""``sppo train`` on several ranks, one of which fails: the job ends, reports why, and resumes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

TIMEOUT_S = 90.0
TRAIN = [sys.executable, "-m", "sppo", "train", "run.yaml"]
TWO_STAGES = "parallel.pipeline_parallel_degree=2"


@pytest.fixture
def endless(work, run_file):
    """A run that would take hours, saved after every step."""
    run_file(
        model={"num_layers": 2},
        train={"steps": 100_000},
        checkpoint={"every": 1, "keep": 2},
        optimizer={"schedule": "constant"},
    )
    return work


def environment(**more):
    others = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    return {**others, "OMP_NUM_THREADS": "1", **more}


@contextmanager
def training(directory, *words, after_steps):
    """``sppo train`` on two stages, once it has done some steps."""
    job = subprocess.Popen(
        [*TRAIN, TWO_STAGES, *words],
        cwd=directory,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: steps_done(directory) >= after_steps or job.poll() is not None)
        assert job.poll() is None, job.communicate()[1]
        yield job
    finally:
        for process in psutil.Process(job.pid).children() if job.poll() is None else []:
            process.kill()
        job.kill()
        job.communicate()


def wait_for(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.05)


def steps_done(directory):
    metrics = Path(directory) / "out/metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def rank_process(job, rank):
    """The process of one rank among the children of the one that started them."""
    for child in psutil.Process(job.pid).children(recursive=True):
        if child.environ().get("RANK") == str(rank):
            return child
    raise AssertionError(f"rank {rank} does not run")


KINDS = {
    "one stage": (),
    "keys on a disk": (
        "model.num_layers=4",
        "parallel.virtual_stages=2",
        "activations.policy=offload_all",
        "activations.kv=offload",
        "activations.disk=spill",
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_killed_ends_the_job_which_then_resumes(endless, kind):
    words, spill = KINDS[kind], endless / "spill"
    spill.mkdir()
    with training(endless, *words, after_steps=2) as job:
        rank_process(job, 1).send_signal(signal.SIGKILL)
        started = time.monotonic()
        _, errors = job.communicate(timeout=60)
        assert time.monotonic() - started < 60
    assert job.returncode == 1
    assert "rank 1" in errors
    assert "SIGKILL" in errors
    assert "step " in errors
    assert "action " in errors
    assert "Traceback" not in errors
    assert list(spill.iterdir()) == []
    before = steps_done(endless)
    done = subprocess.run(
        [*TRAIN, TWO_STAGES, *words, f"train.steps={before + 2}"],
        cwd=endless,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line)["step"] for line in (endless / "out/metrics.jsonl").open()]
    assert steps == list(range(1, before + 3))  # at most the step under way was lost


@pytest.mark.exhaustive
def test_a_signal_saves_on_all_ranks_and_says_what_is_left(endless):
    with training(endless, after_steps=2) as job:
        job.send_signal(signal.SIGTERM)
        output, errors = job.communicate(timeout=60)
    assert job.returncode == 143, errors
    assert "error" not in errors
    assert "SIGTERM: saving after step" in output
    left = r"stopped by SIGTERM after step \d+ of 100000, \d+ left; to go on:\n"
    assert re.search(f"{left}sppo train run.yaml {re.escape(TWO_STAGES)}", output)
    newest = max((endless / "out/checkpoints").glob("step_*"))
    assert int(newest.name.removeprefix("step_")) == steps_done(endless)


def as_rank(directory, rank, *words, world_size, port):
    """One process as torchrun starts them."""
    return subprocess.Popen(
        [*TRAIN, *words],
        cwd=directory,
        env=environment(
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["parallel.pipeline_parallel_degree=3"], "every stage needs a layer"),
        (["parallel.data_parallel_degree=2"], "train.sequences_per_step 1"),
        (["parallel.sequence_parallel_degree=3"], "query heads cannot be sharded"),
        ([TWO_STAGES, "parallel.multiplexed=on", "parallel.zero=3"], "parallel.multiplexed=on"),
        (["parallel.multiplexed=on"], "shards units over pipeline ranks, and there is one"),
    ],
)
def test_bad_degrees_are_told_before_any_process_starts(endless, words, told):
    from tests.conftest import refuse

    assert told in refuse("train", "run.yaml", *words)
    assert not (endless / "out").exists()


def test_what_rank_0_refuses_for_all_is_told_once(endless):
    """Found on the ranks, which know of memory and tiers, and before anything is made."""
    words = [TWO_STAGES, "activations.policy=offload_all"]
    done = subprocess.run(
        [*TRAIN, *words],
        cwd=endless,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert done.stderr.startswith("error: activations.policy 'offload_all' offloads")
    assert len(done.stdout.splitlines()) == 1, "the ranks are announced, and nothing else"
    assert not (endless / "out").exists()
