"""Real threads and a real file: the queues themselves, and a disk that is slow."""

import errno
import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from sppo.activations.activation_layout import ActivationKey, Extent, OffloadSchedule
from sppo.offload.file_tier import FileTier
from sppo.offload.offload_store import OffloadStore
from sppo.offload.queues import Ordering, Region
from sppo.offload.thread_queues import ThreadQueues
from sppo.offload.tier import Tier
from sppo.offload.worker_queue import CancelledError, Lane, Reached
from sppo.train.cpu_device import CpuDevice
from tests.offload.test_offload_store import run_step


@pytest.fixture
def lane():
    made = Lane("test")
    yield made
    made.close()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("lag", [0, 1, 4])
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_threads_bring_back_what_was_sent(kind, lag, interleaved, tmp_path):
    tier = Tier(kind, tmp_path if kind == "disk" else None)
    store = OffloadStore(ThreadQueues(poison=True), tier=tier, source_lag=lag, checksums=True)
    for step in range(5):
        run_step(store, interleaved=interleaved, step=step)
    store.close()
    store.close()


def test_a_slow_disk_is_waited_for_and_the_wait_is_counted(tmp_path, monkeypatch):
    """What the step takes longer is what is reported as exposed."""
    store = OffloadStore(ThreadQueues(), tier=Tier("disk", tmp_path))

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
    store = CpuDevice().offload_store(plan, disk=tmp_path, debug=False)
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
    assert threading.active_count() == before


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


def test_work_is_done_in_the_order_of_its_coming(lane):
    done = []
    for number in range(50):
        last = lane.add(lambda number=number: done.append(number), after=[])
    last.wait()
    assert done == list(range(50))
    assert last.done


def test_work_waits_for_its_events(lane):
    other, gate = Lane("other"), threading.Event()
    first = other.add(gate.wait, after=[])
    second = lane.add(lambda: None, after=[Reached(), first])
    assert not second.done
    gate.set()
    second.wait()
    assert first.done
    other.close()


def test_what_depends_on_failed_work_fails_with_it(lane):
    def fail():
        raise OSError(errno.EIO, "the disk failed", "spill")

    other, ran = Lane("other"), []
    first = other.add(fail, after=[])
    second = lane.add(lambda: ran.append(1), after=[first])
    for _ in range(2):
        with pytest.raises(OSError, match="the disk failed") as caught:
            second.wait()
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, "spill")
    assert not ran
    with pytest.raises(OSError, match="the disk failed"):
        lane.check()
    lane.wait_all()
    lane.check()
    lane.add(lambda: ran.append(1), after=[]).wait()
    assert ran
    other.close()


def test_cancelled_work_is_left_out(lane):
    gate, ran = threading.Event(), []
    lane.add(gate.wait, after=[])
    waiting = lane.add(lambda: ran.append(1), after=[])
    lane.cancel()
    gate.set()
    lane.wait_all()
    with pytest.raises(CancelledError):
        waiting.wait()
    assert not ran
    lane.add(lambda: ran.append(1), after=[]).wait()
    assert ran


def test_busy_seconds_are_those_of_the_work_alone(lane):
    gate, other = threading.Event(), Lane("other")
    late = other.add(gate.wait, after=[])
    lane.add(lambda: time.sleep(0.05), after=[]).wait()
    waiting = lane.add(lambda: None, after=[late])
    time.sleep(0.05)
    gate.set()
    waiting.wait()
    assert 0.05 <= lane.take_busy_s() < 0.09
    assert lane.take_busy_s() == 0
    other.close()


class SlowToReturn(threading.Event):
    """Whoever waits goes on long before the thread that set it."""

    def set(self):
        super().set()
        time.sleep(0.05)


def test_an_error_is_forgotten_for_good(lane):
    """Not noted by the lane's thread once the lane has settled, for the next step to find."""

    def fail():
        raise OSError(errno.EIO, "the disk failed")

    gate = threading.Event()
    lane.add(gate.wait, after=[])
    failing = lane.add(fail, after=[])
    failing._ended = SlowToReturn()
    gate.set()
    lane.wait_all()
    time.sleep(0.1)
    lane.check()


def test_seconds_are_taken_once_while_work_goes_on(lane):
    started, gate = threading.Event(), threading.Event()

    def work():
        started.set()
        gate.wait()

    lane.add(lambda: time.sleep(0.1), after=[]).wait()
    going_on = lane.add(work, after=[])
    started.wait()
    assert lane.take_busy_s() >= 0.1
    gate.set()
    going_on.wait()
    assert lane.take_busy_s() < 0.1


def test_only_events_of_these_queues_are_waited_for():
    class Foreign:
        done = True

    queues = ThreadQueues()
    region = Region("host", 0, queues.host_memory(64))
    with pytest.raises(AssertionError, match="is not of these queues"):
        queues.copy_out(region, [], after=[(Ordering.PRODUCED_BEFORE_OUT, Foreign())])
    queues.close()
