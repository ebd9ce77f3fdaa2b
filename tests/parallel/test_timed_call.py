"""Calls that may never return: their result in time, or none; and how a process ends then."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from sppo.parallel.timed_call import call_in_time, calls_left_behind


def test_what_returns_in_time_is_returned():
    assert call_in_time(lambda: 7, limit_s=60) == 7


def test_what_is_raised_in_time_is_raised():
    with pytest.raises(ZeroDivisionError):
        call_in_time(lambda: 1 // 0, limit_s=60)


def test_a_call_that_takes_longer_is_left_behind_until_it_returns():
    with pytest.raises(TimeoutError):
        call_in_time(lambda: time.sleep(0.5), limit_s=0.01)
    assert calls_left_behind()
    deadline = time.monotonic() + 60
    while calls_left_behind() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not calls_left_behind()


@pytest.mark.parametrize("sleep_s", [0, 600])
def test_a_process_with_a_call_left_behind_ends_without_pythons_shutdown(sleep_s):
    limit_s = 60 if sleep_s == 0 else 0.1
    code = (
        "import atexit, sys, time\n"
        "from sppo.cli.exit_codes import without_calls_left_behind\n"
        "from sppo.parallel.timed_call import call_in_time\n"
        "atexit.register(lambda: print('shut down'))\n"
        "with without_calls_left_behind():\n"
        "    try:\n"
        f"        call_in_time(lambda: time.sleep({sleep_s}), limit_s={limit_s})\n"
        "    except TimeoutError:\n"
        "        pass\n"
        "    print('said')\n"
        "    sys.exit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert done.stdout.split("\n", 1)[0] == "said"
    assert ("shut down" in done.stdout) == (sleep_s == 0)
