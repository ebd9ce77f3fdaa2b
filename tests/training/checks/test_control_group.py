"""Runs in a container with little memory: plans respect the limit, or the run is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from sppo.units import GIB, MIB
from tests.conftest import write_run, write_tokens

LENGTH = 4096
MODEL = {
    "vocab_size": 256,
    "hidden_size": 256,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_size": 768,
}
TOP = Path("/sys/fs/cgroup")


class ControlGroup:
    """Where this test may limit a process's memory, in either version."""

    def __init__(self) -> None:
        version_2 = (TOP / "cgroup.controllers").exists()
        self._limit_file = "memory.max" if version_2 else "memory.limit_in_bytes"
        self._kills_file = "memory.events" if version_2 else "memory.oom_control"
        self.path = (TOP if version_2 else TOP / "memory") / f"sppo-{uuid.uuid4().hex[:8]}"
        self.path.mkdir()

    def limit(self, size: int) -> None:
        (self.path / self._limit_file).write_text(str(size))

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``sppo`` with ``arguments``, all of whose memory counts."""
        return self.run_python("from sppo.__main__ import main; main()", *arguments)

    def run_python(self, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``code``, likewise."""
        enter = f"import os; open({str(self.path / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
        return subprocess.run(
            [sys.executable, "-c", f"{enter}; {code}", *arguments],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        )

    @property
    def kills(self) -> int:
        """Processes that the kernel ended for want of memory."""
        lines = (self.path / self._kills_file).read_text().splitlines()
        return int(dict(line.split() for line in lines).get("oom_kill", 0))


@pytest.fixture
def group():
    try:
        made = ControlGroup()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        made.limit(1 << 40)
    except OSError as error:
        made.path.rmdir()
        pytest.skip(f"the control group takes no limit: {error}")
    yield made
    made.path.rmdir()


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path / "tokens", num_tokens=LENGTH + 1, vocab_size=256)
    (tmp_path / "spill").mkdir()
    return write_run(
        tmp_path / "run.yaml",
        model={"preset": None, **MODEL},
        sequence={"length": LENGTH, "num_subsequences": 8, "alignment": 64},
        activations={"disk": "spill"},
        train={"steps": 1},
    )


LOADED = """
import sppo.training.trainer
from sppo.kernels.native.machine_memory import control_group_room
from sppo.training.checks.room_checks import load_libraries
load_libraries()
print(control_group_room())
"""


def loaded_bytes(group):
    """What a process takes before it has any tensor."""
    group.limit(4 * GIB)
    done = group.run_python(LOADED)
    assert done.returncode == 0, done.stderr
    return 4 * GIB - int(done.stdout)


def metrics(output):
    return [json.loads(line) for line in Path(output, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("limit_mib", [150, 700])
def test_a_limit_below_the_libraries_is_refused_before_they_are_loaded(group, run_file, limit_mib):
    """They would be killed while torch is loaded, which nobody could tell about."""
    group.limit(limit_mib * MIB)
    ranks = [] if limit_mib == 150 else ["parallel.pipeline_parallel_degree=2"]
    refused = group.run("train", str(run_file), *ranks)
    assert refused.returncode == 4, refused.stdout + refused.stderr
    assert "for libraries alone" in refused.stderr
    assert group.kills == 0


@pytest.mark.exhaustive
def test_what_little_is_accepted_trains_to_its_end(group, run_file):
    """Checkpoints, what the first steps leave behind, and plots are in the plan."""
    loaded, small = loaded_bytes(group), ["model.hidden_size=64", "model.num_layers=1"]
    words = ["train", str(run_file), *small, "sequence.length=512", "train.steps=3"]
    group.limit(loaded + 42 * MIB)
    done = group.run(*words, "checkpoint.every=1", "checkpoint.async_save=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert Path("out", "loss.png").exists()
    assert group.kills == 0
    memory = json.loads(Path("out", "run_summary.json").read_text())["memory_bytes"]
    growth = memory["process growth"]
    assert growth["measured"] == pytest.approx(growth["predicted"], rel=0.4)
