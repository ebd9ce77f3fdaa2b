"""``scripts/full_disk.py``: commands that write files, on a real disk that is full."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "full_disk.py"


def _can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=64k", "none", "/tmp"]
    return subprocess.run(mount, capture_output=True).returncode == 0


@pytest.mark.exhaustive
@pytest.mark.skipif(not _can_mount(), reason="this machine lets nobody mount a small disk")
@pytest.mark.parametrize(
    "cases",
    [
        "simulate-all",
        pytest.param(
            "solve,bench,eval,to-hf,from-hf,prepare,train-resumed", marks=pytest.mark.slow
        ),
    ],
)
def test_every_kind_of_file_on_a_full_disk(cases: str) -> None:
    command = [sys.executable, str(SCRIPT), "--only", cases, "--levels", "0,700"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " full disks, 0 failures" in done.stdout
    for case in cases.split(","):  # levels at which it fails, and at which it does not
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(case)]
        assert "'4'" in line
        assert "'0" in line
