"""Process that evaluates functions: its copy of the parent's state, and its end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from unittest import mock

import psutil
import pytest

from sppo.parallel.job.worker_process import WorkerLostError, WorkerProcess
from tests.parallel.job.test_launch import ROOT, wait_for

TIMEOUT_S = 60.0


@pytest.fixture
def worker():
    made = WorkerProcess()
    yield made
    made.close()


def answer(worker, function, *arguments):
    return worker.result(worker.submit(function, *arguments), timeout_s=TIMEOUT_S)


def test_it_has_neither_torch_nor_sockets(worker):
    with socket.socket() as listener, socket.socket() as other:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        other.set_inheritable(True)
        files = answer(worker, eval, "__import__('subprocess').getoutput('ls -l /proc/$PPID/fd')")
    assert "pipe:" in files
    assert "socket:" not in files
    modules = answer(worker, eval, "sorted(__import__('sys').modules)")
    assert "torch" in sys.modules
    assert not {"torch", "numpy", "pytest"} & set(modules)


def test_signals_that_stop_a_run_do_not_end_it(worker):
    answer(worker, os.getpid)
    call = worker.submit(time.sleep, 0.5)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(worker.pid, number)
    assert worker.result(call, timeout_s=TIMEOUT_S) is None
    assert answer(worker, os.getpid) == worker.pid


def test_threads_of_the_pool_take_no_signals(worker):
    """They start while signals are held back, and leave them to the main thread."""
    answer(worker, os.getpid)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_a_killed_process_is_named_and_another_one_starts(worker):
    first = answer(worker, os.getpid)
    call = worker.submit(time.sleep, TIMEOUT_S)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(WorkerLostError, match="was killed by SIGKILL"):
        worker.result(call, timeout_s=TIMEOUT_S)
    with pytest.raises(WorkerLostError, match="was killed by SIGKILL"):
        worker.submit(os.getpid)
    worker.close()
    assert answer(worker, os.getpid) not in (first, os.getpid())


def test_an_exit_is_told_with_its_code(worker):
    with pytest.raises(WorkerLostError, match="ended with exit code 3"):
        answer(worker, os._exit, 3)


def test_a_call_that_takes_too_long_goes_on_until_it_is_closed(worker):
    call = worker.submit(time.sleep, 10 * TIMEOUT_S)
    with pytest.raises(TimeoutError):
        worker.result(call, timeout_s=0.05)
    process = psutil.Process(worker.pid)
    worker.close()
    assert not process.is_running()
    assert worker.pid is None


def test_a_daemonic_process_starts_none(worker):
    daemonic = mock.Mock(daemon=True)
    with (
        mock.patch.object(multiprocessing, "current_process", return_value=daemonic),
        pytest.raises(WorkerLostError, match="daemonic"),
    ):
        worker.submit(os.getpid)


def test_no_room_for_its_queues(worker):
    with (
        mock.patch(
            "sppo.parallel.job.worker_process.ProcessPoolExecutor", side_effect=OSError(28, "")
        ),
        pytest.raises(WorkerLostError, match="cannot be started"),
    ):
        worker.submit(os.getpid)


SCRIPT = """
import os, time
from sppo.parallel.job.worker_process import WorkerProcess
worker = WorkerProcess()  # without a guard: a usual spawn would run this script once more
worker.result(worker.submit(os.getpid), timeout_s=60)
worker.submit(time.sleep, 600)
print(worker.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def script(tmp_path):
    """A process that has a worker, and the worker."""
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    line = process.stdout.readline()
    yield process, psutil.Process(int(line))
    process.kill()
    process.wait()
    process.stdout.close()


def ended(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_process_that_started_it(script, number):
    process, worker = script
    beside = psutil.Process(process.pid).children()
    assert worker in beside
    process.send_signal(number)
    process.wait()
    wait_for(lambda: all(map(ended, beside)))
    assert process.stdout.read() == ""
