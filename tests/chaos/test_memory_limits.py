"""Training under a series of memory limits: each run succeeds, or is refused before it starts.

Needs the right to make control groups (root, in most containers). The exit code is 0 for a run that
trained and went on from its checkpoint, 3 or 4 for a run that was refused and left nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.conftest import write_tokens

pytestmark = pytest.mark.chaos

TOP = Path("/sys/fs/cgroup")
MIB = 1 << 20
LIMITS_MIB = (
    *(150, 200, 250, 270, 280, 290, 300, 310, 320, 330, 340, 360, 380, 400, 420, 440, 460, 480),
    *(500, 540, 580, 620, 680, 740, 800, 900, 1024),
)
LENGTH = 4096
RUN = {
    "model": {
        "vocab_size": 256,
        "hidden_size": 256,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "mlp_size": 768,
    },
    "data": {"tokens": "tokens"},
    "sequence": {"length": LENGTH, "num_subsequences": 8, "alignment": 64},
    "train": {"steps": 3, "dtype": "fp32"},
    "checkpoint": {"every": 1, "keep": 2},
}
SMALL = ("model.hidden_size=64", "model.num_layers=1", "model.mlp_size=64", "sequence.length=512")
CASES = {
    "fp32": (),
    "small": SMALL,
    "bf16": ("train.dtype=bf16",),
    "documents": ("train.dtype=bf16", "data.isolate_documents=true", "data.tokens=documents"),
    "disk": ("activations.disk=spill",),
    "state on disk": ("activations.disk=spill", "state.optimizer=disk", "model.hidden_size=512"),
    "background saves": ("checkpoint.async_save=true",),
    "retain": ("activations.policy=retain",),
    "two ranks": ("parallel.pipeline_parallel_degree=2",),
    "two replicas": ("parallel.data_parallel_degree=2", "train.sequences_per_step=2"),
}


@dataclass(frozen=True)
class ControlGroup:
    """Control group, of version 1 or 2, with a memory limit."""

    path: Path
    limit_file: str

    @staticmethod
    def make() -> ControlGroup:
        """Return a new group without a limit."""
        version_2 = (TOP / "cgroup.controllers").exists()
        path = (TOP if version_2 else TOP / "memory") / f"sppo-{uuid.uuid4().hex[:8]}"
        path.mkdir()
        return ControlGroup(path, "memory.max" if version_2 else "memory.limit_in_bytes")

    def limit(self, size: int) -> None:
        """Set the memory limit in bytes."""
        (self.path / self.limit_file).write_text(str(size))

    def run(self, arguments: Sequence[str], *, directory: Path) -> subprocess.CompletedProcess[str]:
        """Run ``sppo`` with `arguments` in the group."""
        enter = f"import os; open({str(self.path / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
        return subprocess.run(
            [sys.executable, "-c", f"{enter}; from sppo.__main__ import main; main()", *arguments],
            capture_output=True,
            text=True,
            cwd=directory,
            timeout=600,
            check=False,
            env={"OMP_NUM_THREADS": "1", "COLUMNS": "200", **os.environ},
        )


@pytest.fixture(scope="module")
def group() -> Iterator[ControlGroup]:
    """A group that is removed after the tests."""
    try:
        made = ControlGroup.make()
    except OSError as error:
        pytest.skip(f"this machine lets nobody make a control group: {error}")
    yield made
    made.path.rmdir()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file, token data of one and of many documents, and a directory for the tier."""
    made = tmp_path_factory.mktemp("limits")
    (made / "spill").mkdir()
    (made / "run.yaml").write_text(yaml.safe_dump(RUN))
    starts = [0]
    for index in range(220):
        starts.append(starts[-1] + 17 + 7 * index)
    write_tokens(made / "tokens", num_tokens=40 * LENGTH + 1, vocab_size=256)
    documents = tuple(starts[1:-1])
    write_tokens(made / "documents", num_tokens=starts[-1], vocab_size=256, documents=documents)
    return made


@pytest.mark.parametrize("limit_mib", LIMITS_MIB)
@pytest.mark.parametrize("case", CASES)
def test_a_run_trains_or_is_refused(group, directory, case, limit_mib):
    group.limit(limit_mib * MIB)
    output = f"out_{uuid.uuid4().hex[:8]}"
    words = ["train", "run.yaml", f"train.output={output}", *CASES[case]]
    done = group.run(words, directory=directory)
    if done.returncode == 0:  # continue from the checkpoint
        done = group.run([*words, "train.steps=5"], directory=directory)
    if done.returncode == 0:
        assert (directory / output / "loss.png").exists()
        return
    assert done.returncode in (3, 4), done.stderr
    assert "Traceback" not in done.stderr
    assert not (directory / output).exists()
