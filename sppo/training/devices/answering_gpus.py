"""GPUs of this machine that answer: each is tried in a process of its own, which may hang."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress

from sppo.parallel.job.environment import seeing_devices, with_module_path

_USE = "import torch; torch.ones(1, device='cuda').sum().item()"
_LIMIT_S = 120.0
"""Seconds in which a GPU must answer, with the import of torch."""


def answering_gpus(count: int) -> tuple[int, ...]:
    """Return those of the first ``count`` GPUs that compute, by number."""
    environ, until_s = with_module_path(os.environ), time.monotonic() + _LIMIT_S
    tries = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", _USE],
            env=seeing_devices(environ, (number,)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for number in range(count)
    ]
    try:
        for process in tries:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until_s - time.monotonic()))
    finally:
        for process in tries:
            process.kill()
    return tuple(number for number, process in enumerate(tries) if process.returncode == 0)
