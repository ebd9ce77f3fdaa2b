"""The copy streams of a GPU: what comes back is what was sent, however late every copy is."""

import pytest
import torch

from sppo.offload.cuda_queues import CudaQueues
from sppo.offload.moving_store import MovingStore
from sppo.offload.tiers import Tier
from tests.offload import test_moving_store
from tests.offload.test_moving_store import run_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DELAYS = {"none": 0, "every copy 2 ms late": 4_000_000}


@pytest.fixture(autouse=True)
def _tensors_on_the_device(monkeypatch):
    original = test_moving_store.tensors_of
    monkeypatch.setattr(
        test_moving_store,
        "tensors_of",
        lambda key, **options: {n: t.cuda() for n, t in original(key, **options).items()},
    )
    test_moving_store.step_itinerary.cache_clear()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("lag", [0, 1, 5])
@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("delay_cycles", DELAYS.values(), ids=DELAYS)
def test_streams_bring_back_what_was_sent(delay_cycles, kind, lag, interleaved, tmp_path):
    queues = CudaQueues(torch.device("cuda"), poison=True, delay_cycles=delay_cycles)
    tier = Tier(kind, tmp_path if kind == "disk" else None)
    store = MovingStore(queues, tier=tier, source_lag=lag)
    for step in range(3):
        run_step(store, interleaved=interleaved, step=step)
    report = store.take_report()
    assert report.out_bytes == report.back_bytes
    assert report.out_s > 0 < report.back_s
    store.close()


def test_a_step_given_up_leaves_the_streams_idle():
    class GiveUpError(Exception):
        pass

    def give_up(key, tensors):
        raise GiveUpError

    queues = CudaQueues(torch.device("cuda"), poison=True, delay_cycles=4_000_000)
    store = MovingStore(queues, tier=Tier("host"))
    with pytest.raises(GiveUpError):
        run_step(store, interleaved=True, alter=give_up)
    store.discard()
    run_step(store, interleaved=True, step=1)
    store.close()


def test_host_memory_is_page_locked():
    queues = CudaQueues(torch.device("cuda"))
    memory = queues.host_memory(1 << 20)
    assert memory.is_pinned()
    assert queues.register_s > 0
    queues.close()
    assert not memory.is_pinned()
