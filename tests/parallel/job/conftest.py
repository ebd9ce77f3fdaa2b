"""Jobs of a few ranks on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sppo.parallel.job import launch

PREAMBLE = """
import os, signal, sys, time
from pathlib import Path
from sppo.parallel.job.environment import rank_environment
from sppo.parallel.job.flight_record import RankProgress

signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
place = rank_environment(os.environ)
progress = RankProgress(place.progress_file)
rank = place.rank
"""
"""What stands before the code of a rank; it imports no torch."""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Makes a command of Python code; its ranks work in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))

    def command(code: str) -> list[str]:
        path = tmp_path / "rank.py"
        path.write_text(PREAMBLE + code)
        return [sys.executable, str(path)]

    return command


@pytest.fixture
def run(script: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs Python code as every rank of a job and gives its exit code."""

    def run_code(code: str, *, num_ranks: int, grace_s: float = 10.0) -> int:
        monkeypatch.setattr(launch, "_GRACE_S", grace_s)
        end = launch.run_ranks(
            script(code), num_ranks=num_ranks, environ=os.environ, threads_per_rank=1
        )
        end.tell()
        return end.exit_code

    return run_code
