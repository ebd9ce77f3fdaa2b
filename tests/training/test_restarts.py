"""Ranks that are started again after a fault; here they only pretend to train."""

import json

import pytest
from rich.console import Console

from sppo.config import load_run
from sppo.parallel.job import launch
from sppo.training import start
from sppo.training.restarts import train_on_ranks
from sppo.training.start import prepare_run
from tests.conftest import write_run
from tests.parallel.job.conftest import script

__all__ = ["script"]  # a fixture

AT_STEP = """
Path("out").mkdir(exist_ok=True)
step = int(steps[attempt - 1]) if attempt <= len(steps) else None
if step is None:
    sys.exit(0)
if rank != int(os.environ["TO_BLAME"]):
    time.sleep(600)
if step:
    progress.note(step=step, position=1, action="0F1", num_actions=9)
how = os.environ["HOW"]
if how == "KILL":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(how))
"""
"""Fails at the step that is given for the attempt, 0 for none; attempts beyond these end well."""


@pytest.fixture
def train(work, script, monkeypatch):
    """Trains a run of ranks that fail; gives the exit code, starts, failures and what was said."""

    def train(how, *steps, to_blame=1, ranks=2, **keys):
        starts = []

        def run_ranks(words, *, environ, **options):
            starts.append([word for word in words if word.startswith("parallel.")])
            told = {"HOW": how, "TO_BLAME": str(to_blame)}
            code = f"attempt, steps = {len(starts)}, {steps}\n{AT_STEP}"
            return launch.run_ranks(script(code), environ={**environ, **told}, **options)

        monkeypatch.setattr(start, "run_ranks", run_ranks)
        monkeypatch.setattr(launch, "_GRACE_S", 0.1)
        console = Console(record=True, width=200)
        parallel = {"data_parallel_degree": ranks}
        file = write_run(
            work / "run.yaml",
            model={"num_layers": 2},
            parallel=parallel,
            train={"sequences_per_step": ranks, **keys},
        )
        ready = prepare_run(load_run(file), None, console=console)
        assert ready.starts_ranks
        code = train_on_ranks(ready, ["train", "run.yaml"], console=console)
        failures = work / "out/failures.jsonl"
        lines = failures.read_text().splitlines() if failures.exists() else []
        return code, starts, [json.loads(line) for line in lines], console.export_text()

    return train


def test_killed_ranks_start_again_and_each_failure_is_kept(train, capfd):
    code, starts, failures, said = train("KILL", 3, 0, restarts=2)
    assert (code, len(starts)) == (0, 3)
    assert "restart   1 of 2: from the newest checkpoint" in said
    assert "restart   2 of 2" in said
    kept = [(f["attempt"], f["rank"], f["step"], f["exit_code"], f["action"]) for f in failures]
    assert kept == [(1, 1, 3, 1, "restart"), (2, 1, None, 1, "restart")]
    assert "rank 1 of 2 was killed by SIGKILL" in failures[0]["cause"]
    assert failures[0]["report"] in capfd.readouterr().err
    assert failures[0]["seconds"].keys() == {"noticed", "ended"}


def test_a_single_rank_starts_again_too(train):
    code, starts, failures, _ = train("1", 3, to_blame=0, ranks=1, restarts=1)
    assert (code, len(starts), failures[0]["num_ranks"]) == (0, 2, 1)


def test_a_stop_that_was_asked_for_ends_the_run_and_is_no_failure(train):
    code, starts, failures, said = train("143", 3, to_blame=0, ranks=1, restarts=1)
    assert (code, len(starts), failures) == (143, 1, [])
    assert "restart   none: SIGTERM asked for the end" in said


def test_a_fault_that_repeats_and_bad_input_end_the_run(train):
    code, starts, failures, said = train("KILL", 3, 3, restarts=9)
    assert (code, len(starts), failures[-1]["action"]) == (1, 2, "end")
    assert "restart   none: a second fault in a row at step 3" in said
    code, starts, failures, said = train("2", 3, restarts=9)
    assert (code, len(starts), failures[-1]["reason"]) == (
        2,
        1,
        "bad input is not mended by another start",
    )


def test_a_device_to_blame_is_left_out_and_degrees_are_chosen_for_the_others(train, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a,b,c")
    seen = []
    seeing = start.seeing_devices
    monkeypatch.setattr(
        start, "seeing_devices", lambda *args: seen.append(seeing(*args)) or seen[-1]
    )
    code, starts, failures, said = train("5", 3, ranks=3, restarts=1, shrink=True)
    assert code == 0
    assert failures[0]["devices"] == [1]
    assert seen[0]["CUDA_VISIBLE_DEVICES"] == "a,b,c"
    assert set(seen[1]["CUDA_VISIBLE_DEVICES"].split(",")) <= {"a", "c"}
    assert starts[0] == []
    degrees = [int(word.partition("=")[2]) for word in starts[1]]
    assert len(degrees) == 3
    assert max(degrees) <= 2
    assert "chosen for 2 devices; those you write need 3 (train.shrink)" in said
