"""Calls that may never return: their result in time, or none, and the end of the process."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from sppo.parallel.job.timed_call import call_in_time


def test_what_returns_in_time_is_returned():
    assert call_in_time(lambda: 7, limit_s=60) == 7


def test_what_is_raised_in_time_is_raised():
    with pytest.raises(ZeroDivisionError):
        call_in_time(lambda: 1 // 0, limit_s=60)


def test_a_call_that_takes_longer_is_given_up():
    with pytest.raises(TimeoutError):
        call_in_time(lambda: time.sleep(0.5), limit_s=0.01)


PREAMBLE = """
import atexit, os, signal, sys, threading, time
from sppo.parallel.job import timed_call
from sppo.parallel.job.timed_call import call_in_time, without_calls_left_behind

atexit.register(lambda: print("shut down"))
"""
LEFT_BEHIND = """
with without_calls_left_behind():
    try:
        call_in_time(lambda: time.sleep(600), limit_s=0.1)
    except TimeoutError:
        print("said")
        sys.exit({code})
"""
ENDS = {
    "a call that returns": (
        """
with without_calls_left_behind():
    call_in_time(lambda: None, limit_s=60)
    print("said")
    sys.exit(3)
""",
        (3, "said\nshut down\n", ""),
    ),
    "a call left behind": (LEFT_BEHIND.format(code=7), (7, "said\n", "")),
    "without a code": (LEFT_BEHIND.format(code=None), (0, "said\n", "")),
    "with a message": (LEFT_BEHIND.format(code="'gone'"), (1, "said\n", "gone\n")),
    "a signal while a call is started": (
        """
class Stopping(timed_call.Thread):
    def start(self):
        super().start()
        raise KeyboardInterrupt
timed_call.Thread = Stopping
with without_calls_left_behind():
    try:
        call_in_time(lambda: time.sleep(600), limit_s=60)
    except KeyboardInterrupt:
        sys.exit(3)
""",
        (3, "", ""),
    ),
    "a signal in the middle of a call": (
        """
import sppo.__main__
from sppo.cli.stop_signals import stop_signals
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
with without_calls_left_behind(), stop_signals():
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    call_in_time(lambda: time.sleep(600), limit_s=60)
""",
        (143, "", None),
    ),
    "a device that may not answer": (
        """
with without_calls_left_behind():
    timed_call.end_without_shutdown()
    print("said")
    1 // 0
""",
        (1, "said\n", "ZeroDivisionError: integer division or modulo by zero\n"),
    ),
}
"""Programs, and how each ends: exit code, output, and end of its errors; None: any."""


@pytest.mark.parametrize("name", ENDS)
def test_a_process_with_a_call_left_behind_ends_without_pythons_shutdown(name):
    code, (returncode, stdout, stderr) = ENDS[name]
    command = [sys.executable, "-c", PREAMBLE + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (returncode, stdout)
    assert stderr is None or done.stderr.endswith(stderr)
    assert stderr != "" or not done.stderr
