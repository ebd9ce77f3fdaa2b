"""kill -9 during the writing of checkpoints: what is left is complete, and nothing accumulates."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from sppo.checkpoint.checkpoint import CheckpointManager
from tests.checkpoint.save_until_killed import KEEP, state_of


def _whole(directory):
    """Step of the newest checkpoint, all of which is there."""
    manager = CheckpointManager(directory, keep=KEEP, async_save=False)
    found = manager.latest_valid()
    state = {key: torch.zeros_like(tensor) for key, tensor in state_of(0).items()}
    manager.load_into(found, state)
    for key, tensor in state_of(found.step).items():
        assert torch.equal(state[key], tensor), key
    return found.step


def test_a_run_killed_at_each_call_that_changes_the_disk(tmp_path):
    command = [sys.executable, "-m", "tests.checkpoint.save_until_killed", str(tmp_path), "60"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert not runs[-1]["killed"], "the save never got through"
    assert len(runs) > 10
    steps = [_whole(tmp_path / f"call_{run['call']}") for run in runs]
    for run, step in zip(runs, steps, strict=True):
        assert max(run["step"], 2) <= step <= 3
    # Early kills leave step 2 the newest, late ones (while step 1 is pruned) step 3.
    assert (steps[0], steps[-2]) == (2, 3)
    left = next(path.parent for path in sorted(tmp_path.glob("call_*/*.partial-*")))
    step = _whole(left)
    manager = CheckpointManager(left, keep=KEEP, async_save=False)
    manager.save(state_of(step + 1), step=step + 1, metadata={})
    kept = [f"step_{step:06d}", f"step_{step + 1:06d}"]
    assert sorted(path.name for path in left.iterdir()) == kept
