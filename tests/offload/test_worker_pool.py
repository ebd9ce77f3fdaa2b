"""Threads that run work after events: order, errors, cancellation, signals, and references."""

import errno
import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError
from random import Random

import pytest
import torch

from sppo.offload.worker_pool import THREADS, WorkerPool, wait_for


@pytest.fixture
def worker():
    """A pool of one thread."""
    made = WorkerPool("test", threads=1)
    yield made
    made.close()


def fail():
    raise OSError(errno.EIO, "the disk failed", "spill")


def test_threads_end_with_the_pool():
    before = threading.active_count()
    pool = WorkerPool("test")
    assert threading.active_count() == before + THREADS
    for _ in range(2):
        assert pool.close()
    deadline_s = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_a_closed_pool_has_ended_its_work_and_skipped_the_rest():
    pool, gate, begun = WorkerPool("test"), threading.Event(), threading.Barrier(THREADS + 1)
    ran = []

    def work():
        begun.wait(30)
        gate.wait(30)
        ran.append(1)

    held = [pool.submit(work) for _ in range(THREADS)]
    begun.wait(30)
    left = [pool.submit(lambda: ran.append(2), after=held) for _ in range(3 * THREADS)]
    assert not pool.close(limit_s=0.05)
    threading.Timer(0.05, gate.set).start()
    assert pool.close()
    assert ran == [1] * THREADS
    for future in left:
        with pytest.raises(CancelledError):
            wait_for(future)
    with pytest.raises(RuntimeError, match="no thread"):
        pool.submit(lambda: None)


SCRIPT = """
import os, threading, time
from sppo.offload.worker_pool import WorkerPool
one, other = WorkerPool("one", threads=1), WorkerPool("other", threads=1)
begun, gate = threading.Event(), threading.Event()
def hold():
    begun.set()
    gate.wait()
"""
USUAL_EXIT = """
other.submit(lambda: print("done", flush=True), after=[one.submit(hold)])
begun.wait()
"""
CANCELLED = """
one.submit(hold)
begun.wait()
other.submit(lambda: print("done", flush=True), after=[one.submit(lambda: None)])
one.close(limit_s=0)
other.close(limit_s=0)
gate.set()
raise ZeroDivisionError
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [(USUAL_EXIT, 0), pytest.param(CANCELLED, 1, marks=pytest.mark.exhaustive)],
)
def test_a_program_may_end_with_work_in_its_queues(end, code):
    """It waits for nothing, also not for work that never ends."""
    command = [sys.executable, "-c", SCRIPT + end]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr


def test_a_signal_may_interrupt_the_submission_of_work():
    """Whatever it interrupts, the pool can be closed."""

    class Interrupted(BaseException):
        pass

    def interrupt(number, frame):
        raise Interrupted

    before, hit, random_s = signal.signal(signal.SIGALRM, interrupt), 0, Random(0).uniform
    gc.disable()  # what a signal raises within a collection is lost
    try:
        for _ in range(150):
            interrupted = WorkerPool("interrupted", threads=1)
            try:
                signal.setitimer(signal.ITIMER_REAL, random_s(2e-5, 3e-4))
                for _ in range(1000):
                    interrupted.submit(lambda: None)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted:
                hit += 1
            assert interrupted.close(limit_s=30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert hit > 75


@pytest.mark.parametrize("fails", [False, True])
def test_what_work_held_is_free_before_anyone_hears_of_its_end(worker, fails):
    """Neither closure nor traceback nor the events it waited for keep a tensor."""
    tensor = torch.ones(3)
    alive, gate, seen = weakref.ref(tensor), threading.Event(), []

    def work(tensor=tensor):
        gate.wait()
        if fails:
            raise OSError(errno.EIO, f"the disk failed at {tensor}")

    ended = worker.submit(work)
    ended.add_done_callback(lambda _: seen.append(alive()))
    del work, tensor
    gate.set()
    worker.close()
    assert seen == [None]


def test_an_error_keeps_no_frame_of_those_who_wait_for_it(worker):
    def wait_with(tensor):
        with pytest.raises(OSError, match="the disk failed"):
            wait_for(ended)
        return weakref.ref(tensor)

    ended = worker.submit(fail)
    alive = wait_with(torch.ones(3))
    gc.collect()
    assert alive() is None
    with pytest.raises(OSError, match="the disk failed") as first:
        worker.submit(fail)
    with pytest.raises(OSError, match="the disk failed") as second:
        worker.submit(fail)
    assert first.value is not second.value


def test_what_depends_on_failed_work_fails_with_it(worker):
    other, ran = WorkerPool("other", threads=1), []
    first = other.submit(fail)
    second = worker.submit(lambda: ran.append(1), after=[first])
    for _ in range(2):
        with pytest.raises(OSError, match="the disk failed") as caught:
            wait_for(second)
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, "spill")
    assert not ran
    with pytest.raises(OSError, match="the disk failed"):
        worker.submit(fail)
    other.close()
