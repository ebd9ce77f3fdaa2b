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


@pytest.mark.parametrize("sleep_s", [0, 600])
def test_a_process_with_a_call_left_behind_ends_without_pythons_shutdown(sleep_s):
    limit_s = 60 if sleep_s == 0 else 0.1
    code = (
        "import atexit, sys, time\n"
        "from sppo.parallel.job.timed_call import call_in_time, without_calls_left_behind\n"
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


def test_a_signal_while_a_call_is_started_ends_the_process_as_one_in_its_middle_does():
    code = (
        "import atexit, sys, time\n"
        "from sppo.parallel.job import timed_call\n"
        "atexit.register(lambda: print('shut down'))\n"
        "class Stopping(timed_call.Thread):\n"
        "    def start(self):\n"
        "        super().start()\n"
        "        raise KeyboardInterrupt\n"
        "timed_call.Thread = Stopping\n"
        "with timed_call.without_calls_left_behind():\n"
        "    try:\n"
        "        timed_call.call_in_time(lambda: time.sleep(600), limit_s=60)\n"
        "    except KeyboardInterrupt:\n"
        "        sys.exit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "")


@pytest.mark.parametrize(("code", "ends_with"), [("None", 0), ("7", 7), ("'gone'", 1)])
def test_the_exit_code_is_the_one_of_pythons_shutdown(code, ends_with):
    program = (
        "import sys, time\n"
        "from sppo.parallel.job.timed_call import call_in_time, without_calls_left_behind\n"
        "with without_calls_left_behind():\n"
        "    try:\n"
        "        call_in_time(lambda: time.sleep(600), limit_s=0.1)\n"
        "    except TimeoutError:\n"
        f"        sys.exit({code})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == ends_with
    assert done.stderr.strip() == ("gone" if ends_with == 1 else "")


def test_a_signal_in_the_middle_of_a_call_ends_the_process_with_its_code():
    program = (
        "import os, signal, threading, time\n"
        "import sppo.__main__\n"
        "from sppo.cli.stop_signals import stop_signals\n"
        "from sppo.parallel.job.timed_call import call_in_time, without_calls_left_behind\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))\n"
        "import atexit; atexit.register(lambda: print('shut down'))\n"
        "with without_calls_left_behind(), stop_signals():\n"
        "    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        "    call_in_time(lambda: time.sleep(600), limit_s=60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (143, "")


@pytest.mark.parametrize(
    ("end", "code", "said"), [("sys.exit(3)", 3, ""), ("1 // 0", 1, "ZeroDivisionError")]
)
def test_a_process_whose_device_may_not_answer_ends_without_pythons_shutdown(end, code, said):
    program = (
        "import atexit, sys\n"
        "from sppo.parallel.job.timed_call import end_without_shutdown, without_calls_left_behind\n"
        "atexit.register(lambda: print('shut down'))\n"
        "with without_calls_left_behind():\n"
        "    end_without_shutdown()\n"
        "    print('said')\n"
        f"    {end}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (code, "said\n")
    assert said in done.stderr
