"""Runs of two ranks that break in random ways: how they end, and that they resume.

Each case trains a model of 20 thousand parameters on two ranks of this machine and breaks the run
in one way: it kills or stops a rank, or sends a signal at a random moment; with one stage on a
rank, and in the looped order with K and V on a disk. The job must end in time, without a traceback,
with a documented exit code, leave no files on the disk, and resume. Random moments follow from
``--seed``::

    pytest -m "chaos or exhaustive" tests/chaos/test_rank_faults.py --seed 1
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import write_run, write_tokens
from tests.training.jobs import records

TIMEOUT_S = 10
"""``parallel.timeout_s`` of all runs."""
_PATIENT = "parallel.timeout_s=60"
"""Of runs in which no rank waits in vain: on a busy machine ranks start slowly."""
_ENDS_WITHIN_S = 240.0
_RUN: Mapping[str, Mapping[str, object]] = {
    "model": {"num_layers": 4},
    "parallel": {"pipeline_parallel_degree": 2, "timeout_s": TIMEOUT_S},
    "train": {"steps": 100000},
    "checkpoint": {"every": 5, "keep": 2},
}
"""Keys of the small run of all tests that are other here."""
_KINDS: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "one stage on a rank": _RUN,
    "K and V on a disk": {
        **_RUN,
        "parallel": {**_RUN["parallel"], "virtual_stages": 2},
        "activations": {"policy": "offload_all", "kv": "offload", "disk": "spill"},
    },
}
"""Sections of the run file, by kind of run."""
_NOISE = ("CPU tensors: ", "attention back end", "saved ", "going on after")


@dataclass(frozen=True, slots=True)
class Ended:
    """Exit code and errors of a job.

    The returncode is None if the process did not end.
    """

    returncode: int | None
    errors: str

    def problem(self, codes: Sequence[int], *words: str) -> str:
        """Return what is wrong with the end of the job; "" if it ended as it must."""
        if self.returncode is None:
            return f"it did not end within {_ENDS_WITHIN_S:g} s"
        if self.returncode not in codes:
            return f"exit code {self.returncode}, not {codes}: {self.errors[-600:]}"
        if "Traceback" in self.errors:
            return f"a traceback: {self.errors[-600:]}"
        missing = [word for word in words if word not in self.errors]
        return f"{missing} not said: {self.errors[-600:]}" if missing else ""


class Job:
    """Process of ``sppo train`` in its own directory, with functions to find and end its ranks."""

    def __init__(self, directory: Path, *words: str) -> None:
        self.directory = directory
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - goes with the job
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sppo", "train", "run.yaml", *words],
            cwd=directory,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            text=True,
        )

    def steps(self) -> int:
        """Return the number of steps in the metrics."""
        metrics = self.directory / "out/metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def wait_for_steps(self, count: int) -> bool:
        """Return whether the run reached `count` steps before it ended or the time was over."""
        until_s = time.monotonic() + _ENDS_WITHIN_S
        while time.monotonic() < until_s and self.process.poll() is None:
            if self.steps() >= count:
                return True
            time.sleep(0.1)
        return False

    def rank(self, number: int) -> int:
        """Return the process id of a rank that the job started."""
        for child in _children(self.process.pid):
            with contextlib.suppress(OSError):
                if f"\0RANK={number}\0" in Path(f"/proc/{child}/environ").read_text():
                    return child
        raise ProcessLookupError(f"rank {number} does not run")

    def end(self) -> Ended:
        """Wait for the end of the job; kill it if it does not end in time."""
        try:
            returncode: int | None = self.process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            returncode = None
            for child in _children(self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
        self._errors.seek(0)
        lines = [line for line in self._errors if not line.startswith(_NOISE)]
        return Ended(returncode, "".join(lines))


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in task.read_text().split()]
    return found


def killed(directory: Path, dice: random.Random) -> str:
    """Kill a rank at a random moment."""
    job, rank = Job(directory, _PATIENT), dice.randrange(2)
    if not job.wait_for_steps(dice.randrange(1, 12)):
        return f"it did not train: {job.end()}"
    time.sleep(dice.random() * 0.3)
    os.kill(job.rank(rank), signal.SIGKILL)
    return job.end().problem([1], f"rank {rank} of 2 was killed by SIGKILL", "step ", "action ")


def stopped(directory: Path, dice: random.Random) -> str:
    """Stop a rank with SIGSTOP: the others time out, and the report names the stopped rank."""
    job, rank = Job(directory, "checkpoint.every=0"), dice.randrange(2)
    if not job.wait_for_steps(dice.randrange(1, 6)):
        return f"it did not train: {job.end()}"
    os.kill(job.rank(rank), signal.SIGSTOP)
    # No seconds are reported if the wait for another message has already closed the connection.
    return job.end().problem([1], f"rank {rank} of 2 did not answer", "timed out")


def slow(directory: Path, dice: random.Random) -> str:
    """Stop a rank for less than the timeout: the run must succeed."""
    job = Job(directory, "train.steps=12")
    if not job.wait_for_steps(2):
        return f"it did not train: {job.end()}"
    rank = job.rank(dice.randrange(2))
    os.kill(rank, signal.SIGSTOP)
    time.sleep(TIMEOUT_S / 4)
    os.kill(rank, signal.SIGCONT)
    return job.end().problem([0])


def asked(directory: Path, dice: random.Random) -> str:
    """Send SIGTERM or SIGINT after the command has started, during its start-up or a step."""
    number = dice.choice([signal.SIGTERM, signal.SIGINT])
    job = Job(directory)
    time.sleep(1 + dice.random() * 25)
    job.process.send_signal(number)
    ended = job.end()
    return ended.problem([128 + number])


FAULTS: Mapping[str, Callable[[Path, random.Random], str]] = {
    fault.__name__: fault for fault in (killed, stopped, slow, asked)
}


def left_behind(directory: Path) -> str:
    """Return which files a run has left on its disk tier; "" if none."""
    files = sorted(path.name for path in (directory / "spill").iterdir())
    return f"left on the disk tier: {files}" if files else ""


def goes_on(directory: Path) -> str:
    """Resume the run after a fault for two steps; return what went wrong, or ""."""
    metrics = directory / "out/metrics.jsonl"
    before = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    job = Job(directory, f"train.steps={before + 2}", _PATIENT)
    if problem := job.end().problem([0]):
        return problem
    steps = [record["step"] for record in records(directory / "out")]
    return "" if steps == list(range(1, before + 3)) else f"not each step once: {steps}"


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name == "killed" else pytest.mark.chaos)
        for name in FAULTS
    ],
)
def test_a_broken_run_ends_as_it_must_and_resumes(fault, kind, tmp_path, pytestconfig):
    write_run(tmp_path / "run.yaml", **_KINDS[kind])
    write_tokens(tmp_path / "tokens")
    (tmp_path / "spill").mkdir()
    dice = random.Random(f"{pytestconfig.getoption('--seed')} {fault} {kind}")
    assert not FAULTS[fault](tmp_path, dice)
    assert not left_behind(tmp_path)
    assert not goes_on(tmp_path)
    assert not left_behind(tmp_path)
