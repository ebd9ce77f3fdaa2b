"""The optimizer in host memory against the one on the device: the same weights, the same state."""

import logging

import pytest
import torch

from sppo.cost.state_tiers import ON_DEVICE
from sppo.offload import cuda_lane
from sppo.offload.cuda_lane import CudaLane
from sppo.offload.lane import Lane
from sppo.optim.adamw import AdamW
from sppo.optim.host_adamw import HostAdamW, OptimizerRows
from sppo.planning.plan import read_plan
from tests.conftest import succeed
from tests.engine.streaming import LateLane
from tests.offload.test_cuda_lane import on_gpu, runtime_without_a_gpu
from tests.optim.test_adamw import CONFIG, SHAPES, _tensors

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def pair(dtype, *, lane, bucket_elements):
    """Both optimizers on equal weights of their own."""
    masters = _tensors(0)
    narrow = None if dtype is torch.float32 else masters
    device = {name: master.to(dtype, copy=True) for name, master in masters.items()}
    host = {name: weight.clone() for name, weight in device.items()}
    copies = None if narrow is None else {n: m.clone() for n, m in narrow.items()}
    rows = OptimizerRows(SHAPES, config=CONFIG)
    rows.fill(host if narrow is None else narrow)
    return (
        (device, AdamW(device, config=CONFIG, masters=copies)),
        (
            host,
            HostAdamW(
                host,
                config=CONFIG,
                rows=rows,
                lane=lane,
                bucket_elements=bucket_elements,
            ),
        ),
    )


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("bucket_elements", [64, 1000, 1 << 24])
@pytest.mark.parametrize("lane", [Lane, LateLane])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_as_on_the_device(dtype, lane, bucket_elements):
    (device, plain), (host, offloaded) = pair(
        DTYPES[dtype], lane=lane(), bucket_elements=bucket_elements
    )
    assert_equal(device, host)
    for step in range(4):
        gradients = _tensors(step + 1)
        plain.step(gradients, lr=1e-2 / (step + 1))
        offloaded.step(gradients, lr=1e-2 / (step + 1))
        assert_equal(device, host)
    assert_equal(plain.state(), offloaded.state())
    assert plain.steps == offloaded.steps == 4


def test_buckets_hold_every_element_once_and_one_kind():
    _, (_, optimizer) = pair(torch.bfloat16, lane=Lane(), bucket_elements=500)
    covered = {name: torch.zeros(torch.Size(shape).numel()) for name, shape in SHAPES.items()}
    ends = [0]
    for bucket in optimizer._buckets:
        assert bucket.begin == ends[-1]
        assert 0 < bucket.elements <= 500
        ends.append(bucket.end)
        for part in bucket.parts:
            covered[part.name][part.elements] += 1
            assert bucket.rule.weight_decay == (0.1 if len(SHAPES[part.name]) > 1 else 0)
    assert all((count == 1).all() for count in covered.values())
    elements = sum(count.numel() for count in covered.values())
    # Masters and moments, two slots of fp32 gradients, two of bf16 weights.
    assert optimizer.row_bytes + optimizer.staging_bytes == 12 * elements + 2 * 500 * (4 + 2)


def test_odd_buckets_are_within_one_rounding():
    """Elements that fill no vector of the CPU may be rounded once less, or more."""
    (device, plain), (host, offloaded) = pair(torch.float32, lane=Lane(), bucket_elements=37)
    for step in range(3):
        for optimizer in (plain, offloaded):
            optimizer.step(_tensors(step + 1), lr=1e-2)
    for name in device:
        torch.testing.assert_close(host[name], device[name], rtol=1e-6, atol=1e-7)


def test_on_a_cpu_it_changes_nothing_and_says_so(work, caplog):
    caplog.set_level(logging.INFO)
    succeed("train", "run.yaml", "state.optimizer=host", "train.steps=1")
    assert caplog.text.count("state.optimizer=host: it stays") == 1
    plan = read_plan(work / "out" / "plan.json")
    assert plan.state == ON_DEVICE


def test_checkpoints_go_both_ways():
    """What one saves the other goes on from, as if it had been there all the time."""
    (device, plain), (host, offloaded) = pair(torch.bfloat16, lane=LateLane(), bucket_elements=320)
    offloaded.step(_tensors(1), lr=1e-2)
    plain.load_state({key: tensor.clone() for key, tensor in offloaded.state().items()})
    assert plain.steps == 1
    assert_equal(device, host)
    plain.step(_tensors(2), lr=1e-2)
    live = offloaded.state()
    for key, tensor in plain.state().items():
        live[key].copy_(tensor)
    offloaded.load_state(live)
    assert_equal(device, host)
    for optimizer in (plain, offloaded):
        optimizer.step(_tensors(3), lr=1e-2)
    assert_equal(device, host)
    assert_equal(plain.state(), offloaded.state())


def test_the_copies_of_a_gpu_without_one(monkeypatch):
    """Streams that run at once: the bookkeeping, the locked memory, the same bits."""
    runtime = runtime_without_a_gpu()
    monkeypatch.setattr(cuda_lane, "_cuda", runtime)
    lane = CudaLane(torch.device("cpu"), is_timed=False)
    (device, plain), (host, offloaded) = pair(torch.bfloat16, lane=lane, bucket_elements=320)
    assert len(runtime.locked) == 1
    for optimizer in (plain, offloaded):
        optimizer.step(_tensors(1), lr=1e-2)
    assert_equal(device, host)


@on_gpu
def test_a_gpu_gets_the_weights_of_the_host():
    """Against the same optimizer with copies that are done at once, on a CPU: bit for bit."""
    device = torch.device("cuda")
    masters = _tensors(0)
    results = []
    for where, lane in ((device, CudaLane(device)), ("cpu", Lane())):
        weights = {name: master.to(where, torch.bfloat16) for name, master in masters.items()}
        rows = OptimizerRows(SHAPES, config=CONFIG)
        rows.fill(masters)
        optimizer = HostAdamW(weights, config=CONFIG, rows=rows, lane=lane, bucket_elements=320)
        for step in range(3):
            gradients = {name: g.to(where) for name, g in _tensors(step + 1).items()}
            optimizer.step(gradients, lr=1e-2)
        results.append({name: weight.cpu() for name, weight in weights.items()})
    assert_equal(*results)
