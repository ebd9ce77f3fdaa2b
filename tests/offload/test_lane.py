"""Lane of a CPU: a real disk, also a slow and a faulty one."""

import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from sppo.activations.activation_layout import ActivationKey, Extent, OffloadSchedule
from sppo.offload.block_store import BlockStore
from sppo.offload.disk import file_tier
from sppo.offload.lane import Lane, MappedFileLane
from sppo.offload.worker_pool import wait_for
from sppo.training.devices.cpu_device import CpuDevice
from tests.offload.test_block_store import run_step


@pytest.fixture
def slow_disk(monkeypatch):
    """A disk that takes 20 ms for everything, once it is called."""
    system_io = file_tier._system_io

    def slow(*arguments):
        time.sleep(0.02)
        return system_io(*arguments)

    return lambda: monkeypatch.setattr(file_tier, "_system_io", slow)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("lag", [0, 1, 4])
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_it_brings_back_what_was_sent(kind, lag, interleaved, tmp_path):
    disk = tmp_path if kind == "disk" else None
    store = BlockStore(Lane(), disk=disk, source_lag=lag, debug=True)
    for step in range(5):
        run_step(store, interleaved=interleaved, step=step)
    store.close()
    store.close()


def test_a_slow_disk_is_waited_for_and_the_wait_is_counted(tmp_path, slow_disk):
    """What the step takes longer is what is reported as exposed."""
    store = BlockStore(Lane(), disk=tmp_path)

    def step_s(step):
        start = time.perf_counter()
        run_step(store, interleaved=False, step=step, staging_slots=1)
        return time.perf_counter() - start

    step_s(0)
    store.take_report()
    fast_s, fast = step_s(1), store.take_report()
    slow_disk()
    slow_s, slow = step_s(2), store.take_report()
    assert slow_s - fast_s > 0.4
    assert slow.exposed_s - fast.exposed_s == pytest.approx(slow_s - fast_s, rel=0.25)
    assert slow.out_s > 0.02 * 20
    assert slow.back_s > 0.02 * 6  # up to three blocks at once
    store.close()


def test_nothing_computes_while_what_was_saved_waits_for_a_slow_disk(tmp_path, slow_disk):
    """With every staging slot waiting, the offloaded tensors of two layers would be there at
    once."""
    slow_disk()
    plan = SimpleNamespace(offloads_anything=True)
    store = CpuDevice().block_store(plan, disk=tmp_path, debug=False, failed_step_timeout_s=None)
    keys = [ActivationKey(0, 0, layer) for layer in range(8)]
    places = {key: Extent(4096 * key.layer, 4096) for key in keys}
    store.prepare(OffloadSchedule(places, keys[::-1], staging_slots=2, ring_slots=3))
    for key in keys:
        tensors = {"x_in": torch.full((1024,), float(key.layer))}
        alive = weakref.ref(tensors["x_in"])
        store.put(key, offloaded=tensors)
        del tensors
        assert alive() is None, f"layer {key.layer} is still there when the next one runs"
    store.close()


def test_pages_of_a_mapped_file_are_dropped_after_each_tensor():
    dropped = []
    lane = MappedFileLane(lambda: dropped.append(1))
    sources = [torch.arange(5.0), torch.arange(3).bfloat16()]
    copies = [(torch.empty_like(source), source) for source in sources]
    wait_for(lane.out(copies, after=[lane.computed(sources)]))
    back = [(torch.empty_like(source), source) for source, _ in copies]
    lane.before_compute(lane.back(back, after=[]))
    assert all(torch.equal(got, sent) for (got, _), sent in zip(back, sources, strict=True))
    assert len(dropped) == 4
    lane.close()
