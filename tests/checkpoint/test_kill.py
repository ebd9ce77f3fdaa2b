"""kill -9 during the writing of checkpoints: what is left is complete, and nothing accumulates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sppo.checkpoint.checkpoint import CheckpointManager
from tests.checkpoint.save_until_killed import KEEP, state_of


def _run(directory: Path, mode: str, number: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.checkpoint.save_until_killed", str(directory), mode]
    done = subprocess.run(
        [*command, str(number)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _assert_whole(directory: Path, *, at_least: int) -> int:
    manager = CheckpointManager(directory, keep=KEEP, async_save=False)
    found = manager.latest_valid()
    if found is None:
        assert at_least == 0
        return 0
    assert found.step >= at_least
    state = {key: torch.zeros_like(tensor) for key, tensor in state_of(0).items()}
    manager.load_into(found, state)
    for key, tensor in state_of(found.step).items():
        assert torch.equal(state[key], tensor), key
    return found.step


@pytest.mark.exhaustive
def test_runs_killed_at_random_moments(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    runs = _run(directory, "random", 16)
    reached = max(run["step"] for run in runs)
    assert reached >= 5, "the runs were killed before they saved anything"
    partial = [name for run in runs for name in run["names"] if ".partial-" in name]
    assert partial, "no run was killed while it wrote"
    latest = _assert_whole(directory, at_least=reached)

    manager = CheckpointManager(directory, keep=KEEP, async_save=False)
    manager.save(state_of(latest + 1), step=latest + 1, metadata={})
    kept = sorted(path.name for path in directory.iterdir())
    assert kept == [f"step_{latest:06d}", f"step_{latest + 1:06d}"]


def test_a_run_killed_at_each_call_that_changes_the_disk(tmp_path: Path) -> None:
    runs = _run(tmp_path, "calls", 60)
    assert not runs[-1]["killed"], "the save never got through"
    assert len(runs) > 10
    for run in runs:
        directory = tmp_path / f"call_{run['call']}"
        step = _assert_whole(directory, at_least=max(run["step"], 2))
        assert step in (2, 3)
    # Early kills leave step 2 the newest, late ones (while step 1 is pruned) step 3.
    assert _assert_whole(tmp_path / "call_0", at_least=2) == 2
    assert _assert_whole(tmp_path / f"call_{runs[-2]['call']}", at_least=2) == 3
