"""Real threads and a real file: the queues themselves, and a disk that is slow."""

import errno
import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError, Future
from random import Random
from types import SimpleNamespace

import pytest
import torch

from sppo.activations.activation_layout import ActivationKey, Extent, OffloadSchedule
from sppo.offload.disk.file_tier import FileTier
from sppo.offload.offload_store import OffloadStore
from sppo.offload.queues.copy_queues import Ordering, Region
from sppo.offload.queues.thread_queues import ThreadQueues
from sppo.offload.queues.worker_queue import WorkerQueue, close_queues, wait_for
from sppo.training.devices.cpu_device import CpuDevice
from tests.offload.test_offload_store import failing_disk, run_step


@pytest.fixture
def queue():
    made = WorkerQueue("test")
    yield made
    made.close()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("lag", [0, 1, 4])
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_threads_bring_back_what_was_sent(kind, lag, interleaved, tmp_path):
    disk = tmp_path if kind == "disk" else None
    store = OffloadStore(ThreadQueues(poison=True), disk=disk, source_lag=lag, checksums=True)
    for step in range(5):
        run_step(store, interleaved=interleaved, step=step)
    store.close()
    store.close()


def test_a_slow_disk_is_waited_for_and_the_wait_is_counted(tmp_path, monkeypatch):
    """What the step takes longer is what is reported as exposed."""
    store = OffloadStore(ThreadQueues(), disk=tmp_path)

    def step_s(step):
        start = time.perf_counter()
        run_step(store, interleaved=False, step=step)
        return time.perf_counter() - start

    step_s(0)
    store.take_report()
    fast_s, fast = step_s(1), store.take_report()
    for verb in ("write", "read"):
        original = getattr(FileTier, verb)

        def slow(self, offset_bytes, array, original=original):
            time.sleep(0.02)
            return original(self, offset_bytes, array)

        monkeypatch.setattr(FileTier, verb, slow)
    slow_s, slow_report = step_s(2), store.take_report()
    assert slow_s - fast_s > 0.5
    exposed_s = slow_report.exposed_s - fast.exposed_s
    assert exposed_s == pytest.approx(slow_s - fast_s, rel=0.25)
    assert slow_report.out_s > 0.02 * 20
    assert slow_report.back_s > 0.02 * 20
    store.close()


def test_nothing_computes_while_what_was_saved_waits_for_a_slow_disk(tmp_path, monkeypatch):
    """With every staging slot waiting, the offloaded tensors of two layers would be there at
    once."""
    original = FileTier.write

    def slow(self, offset_bytes, array):
        time.sleep(0.02)
        return original(self, offset_bytes, array)

    monkeypatch.setattr(FileTier, "write", slow)
    plan = SimpleNamespace(offloads_anything=True)
    store = CpuDevice().offload_store(plan, disk=tmp_path, debug=False, failed_step_timeout_s=None)
    keys = [ActivationKey(0, 0, layer) for layer in range(8)]
    places = {key: Extent(4096 * key.layer, 4096) for key in keys}
    store.prepare(OffloadSchedule(places, keys[::-1], staging_slots=2, ring_slots=3))
    for key in keys:
        tensors = {"x_in": torch.full((1024,), float(key.layer))}
        alive = weakref.ref(tensors["x_in"])
        store.save(key, tensors)
        del tensors
        assert alive() is None, f"layer {key.layer} is still there when the next one runs"
    store.close()


def test_threads_end_with_the_queues():
    before = threading.active_count()
    queues = ThreadQueues()
    assert threading.active_count() == before + 4
    queues.close()
    assert threading.active_count() == before
    dropped = ThreadQueues()
    assert threading.active_count() == before + 4
    del dropped
    gc.collect()
    deadline_s = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert threading.active_count() == before


SCRIPT = """
import os, threading, time
from sppo.offload.queues.worker_queue import WorkerQueue
one, other = WorkerQueue("one"), WorkerQueue("other")
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
one.cancel()
other.cancel()
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
    """Whatever it interrupts, what was given up is left out, and the next step is done."""

    class Interrupted(BaseException):
        pass

    def interrupt(number, frame):
        raise Interrupted

    before, hit, ran, random_s = signal.signal(signal.SIGALRM, interrupt), 0, [], Random(0).uniform
    gc.disable()  # what a signal raises within a collection is lost
    try:
        for _ in range(150):
            interrupted = WorkerQueue("interrupted")
            try:
                signal.setitimer(signal.ITIMER_REAL, random_s(2e-5, 3e-4))
                for _ in range(1000):
                    interrupted.submit(lambda: None)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted:
                hit += 1
            interrupted.cancel()
            interrupted.wait_all()
            wait_for(interrupted.submit(lambda: ran.append("next")))
            interrupted.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert len(ran) == 150
    assert hit > 75


def test_a_closed_queue_takes_no_work(queue):
    queue.close()
    queue.wait_all()
    with pytest.raises(RuntimeError, match="no thread"):
        queue.submit(lambda: None)


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_report_is_of_the_step_that_followed_a_failed_one(verb, tmp_path):
    store = OffloadStore(ThreadQueues(), disk=tmp_path)
    run_step(store, interleaved=False, step=0)
    whole = store.take_report()
    with failing_disk(verb), pytest.raises(OSError, match="the disk failed"):
        run_step(store, interleaved=False, step=1)
    store.drain()
    assert store.take_report().out_s == 0.0
    run_step(store, interleaved=False, step=2)
    report = store.take_report()
    assert (report.out_bytes, report.back_bytes) == (whole.out_bytes, whole.back_bytes)
    store.close()


@pytest.mark.parametrize("fails", [False, True])
def test_what_work_held_is_free_before_anyone_hears_of_its_end(queue, fails):
    """Neither closure nor traceback nor the events it waited for keep a tensor."""
    tensor = torch.ones(3)
    alive, gate, seen = weakref.ref(tensor), threading.Event(), []

    def work(tensor=tensor):
        gate.wait()
        if fails:
            raise OSError(errno.EIO, f"the disk failed at {tensor}")

    ended = queue.submit(work)
    ended.add_done_callback(lambda _: seen.append(alive()))
    del work, tensor
    gate.set()
    queue.wait_all()
    assert seen == [None]


def test_an_error_keeps_no_frame_of_those_who_wait_for_it(queue):
    def fail():
        raise OSError(errno.EIO, "the disk failed")

    def wait_with(tensor):
        with pytest.raises(OSError, match="the disk failed"):
            wait_for(ended)
        return weakref.ref(tensor)

    ended = queue.submit(fail)
    alive = wait_with(torch.ones(3))
    gc.collect()
    assert alive() is None
    with pytest.raises(OSError, match="the disk failed") as first:
        queue.check()
    with pytest.raises(OSError, match="the disk failed") as second:
        queue.check()
    assert first.value is not second.value


def test_queues_that_wait_for_one_another_are_closed_together(queue):
    other, gate, begun = WorkerQueue("other"), threading.Event(), threading.Event()
    ran = []
    queue.submit(lambda: (begun.set(), gate.wait()))
    begun.wait()
    first = other.submit(lambda: ran.append(1), after=[queue.submit(lambda: ran.append(2))])
    queue.submit(lambda: ran.append(3), after=[first])
    threading.Timer(0.05, gate.set).start()
    close_queues([other, queue])
    assert not ran


def test_a_tensor_that_was_copied_out_is_let_go():
    """Nothing holds its memory any more, even where nobody waits for the copy."""
    queues = ThreadQueues()
    region = Region("host", 0, queues.host_memory(4096))
    source = torch.arange(8.0)
    alive = weakref.ref(source)
    copied = queues.copy_out(region, [(64, source)], after=())
    queues.reusable(copied)
    del source
    gc.collect()
    assert alive() is None
    assert torch.equal(region.data[64:96].view(torch.float32), torch.arange(8.0))
    queues.close()


def test_work_is_done_in_the_order_of_its_coming(queue):
    done = []
    for number in range(50):
        last = queue.submit(lambda number=number: done.append(number))
    wait_for(last)
    assert done == list(range(50))
    assert last.done()


def test_work_waits_for_its_events(queue):
    other, gate = WorkerQueue("other"), threading.Event()
    first = other.submit(gate.wait)
    second = queue.submit(lambda: None, after=[first])
    assert not second.done()
    gate.set()
    wait_for(second)
    assert first.done()
    other.close()


def test_what_depends_on_failed_work_fails_with_it(queue):
    def fail():
        raise OSError(errno.EIO, "the disk failed", "spill")

    other, ran = WorkerQueue("other"), []
    first = other.submit(fail)
    second = queue.submit(lambda: ran.append(1), after=[first])
    for _ in range(2):
        with pytest.raises(OSError, match="the disk failed") as caught:
            wait_for(second)
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, "spill")
    assert not ran
    with pytest.raises(OSError, match="the disk failed"):
        queue.check()
    queue.wait_all()
    queue.check()
    wait_for(queue.submit(lambda: ran.append(1)))
    assert ran
    other.close()


def test_cancelled_work_is_left_out(queue):
    gate, ran = threading.Event(), []
    queue.submit(gate.wait)
    waiting = queue.submit(lambda: ran.append(1))
    queue.cancel()
    gate.set()
    queue.wait_all()
    with pytest.raises(CancelledError):
        wait_for(waiting)
    assert not ran
    wait_for(queue.submit(lambda: ran.append(1)))
    assert ran


def test_busy_seconds_are_those_of_the_work_alone(queue):
    gate, other = threading.Event(), WorkerQueue("other")
    late = other.submit(gate.wait)
    wait_for(queue.submit(lambda: time.sleep(0.05)))
    waiting = queue.submit(lambda: None, after=[late])
    time.sleep(0.05)
    gate.set()
    wait_for(waiting)
    assert 0.05 <= queue.take_busy_s() < 0.09
    assert queue.take_busy_s() == 0
    other.close()


def test_an_error_is_forgotten_for_good(queue, monkeypatch):
    """The thread records no error once all was waited for, which the next step would find."""
    set_exception = Future.set_exception

    def slow_to_return(future, error):
        set_exception(future, error)  # who waits goes on long before the thread
        time.sleep(0.05)

    monkeypatch.setattr(Future, "set_exception", slow_to_return)

    def fail():
        raise OSError(errno.EIO, "the disk failed")

    gate = threading.Event()
    queue.submit(gate.wait)
    queue.submit(fail)
    gate.set()
    queue.wait_all()
    time.sleep(0.1)
    queue.check()


def test_seconds_are_taken_once_while_work_goes_on(queue):
    started, gate = threading.Event(), threading.Event()

    def work():
        started.set()
        gate.wait()

    wait_for(queue.submit(lambda: time.sleep(0.1)))
    going_on = queue.submit(work)
    started.wait()
    assert queue.take_busy_s() >= 0.1
    gate.set()
    wait_for(going_on)
    assert queue.take_busy_s() < 0.1


def test_only_events_of_these_queues_are_waited_for():
    class Foreign:
        done = True

    queues = ThreadQueues()
    region = Region("host", 0, queues.host_memory(64))
    with pytest.raises(AssertionError, match="is not of these queues"):
        queues.copy_out(region, [], after=[(Ordering.PRODUCED_BEFORE_OUT, Foreign())])
    queues.close()
