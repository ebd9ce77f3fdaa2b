"""Commands that write files, on a real disk that is full."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.full_disk import CASES

ROOT = Path(__file__).parents[2]


def _can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=64k", "none", "/tmp"]
    return subprocess.run(mount, capture_output=True).returncode == 0


@pytest.mark.skipif(not _can_mount(), reason="this machine lets nobody mount a small disk")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            name, marks=pytest.mark.exhaustive if name == "simulate-all" else pytest.mark.chaos
        )
        for name in CASES
    ],
)
def test_every_kind_of_file_on_a_full_disk(case: str) -> None:
    program = [sys.executable, "-m", "tests.chaos.full_disk", case, "0", "700"]
    done = subprocess.run(
        ["unshare", "-rm", *program], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # A level at which it fails, and one at which it does not.
    assert "0 pages left: 4\n700 pages left: 0" in done.stdout
