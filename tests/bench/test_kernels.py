"""Measured calls are what the planner counts: the prediction of a measured call is its time."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sppo.bench import attention, delta_rule, elementwise, gemm
from sppo.bench.attention import attention_problems
from sppo.bench.kernel_calls import MAKERS
from sppo.bench.operands import DTYPES
from sppo.bench.timing import KernelBench, Rounds, Timing
from sppo.cost.elementwise.layer_work import PASSES, bytes_per_element
from sppo.hardware.presets import PRESETS
from tests.bench.test_timing import Watcher, bench_of

CPU = PRESETS["laptop-cpu"].device
ONCE = Rounds(count=1, window_s=0.0)


def test_gemm_rates_predict_the_time_they_came_from():
    timings = {("bf16", 512, 256, "forward"): Timing(1e-3, 0.0)}
    timings |= {
        ("bf16", 512, 256, "input"): Timing(2e-3, 0.0),
        ("bf16", 512, 256, "weight"): Timing(3e-3, 0.0),
    }
    device = replace(CPU, gemm_points=gemm.gemm_points(timings))
    for product, seconds in (("forward", 1e-3), ("input", 2e-3), ("weight", 3e-3)):
        rate = device.gemm_flops_per_s("bf16", tokens=np.array([512.0]), width=256, product=product)
        assert 2 * 512 * 256**2 / rate == pytest.approx(seconds)


@pytest.mark.parametrize("dtype", DTYPES)
def test_elementwise_rates_predict_the_time_they_came_from(dtype):
    kernels = list(elementwise.kernels_of(dtype, device="cpu"))
    timings = {(kernel, dtype, 4096): Timing(1e-3 * n, 0.0) for n, kernel in enumerate(kernels, 1)}
    device = replace(CPU, elementwise_points=elementwise.elementwise_points(timings))
    for n, kernel in enumerate(kernels, 1):
        rate = device.elementwise_bytes_per_s(kernel, dtype, elements=np.array([4096.0]))
        carried = 4096 * bytes_per_element(kernel, element_bytes=DTYPES[dtype].itemsize)
        assert carried / rate == pytest.approx(1e-3 * n)


def test_every_kernel_of_the_planner_can_be_measured():
    assert MAKERS.keys() == PASSES.keys()
    assert set(elementwise.kernels_of("bf16", device="cpu")) == PASSES.keys()
    assert "narrow" not in set(elementwise.kernels_of("fp32", device="cpu"))
    assert "save" not in set(elementwise.kernels_of("bf16", device="cuda"))


def test_bytes_are_the_least_a_kernel_moves():
    assert bytes_per_element("copy", element_bytes=2) == 4
    assert bytes_per_element("narrow", element_bytes=2) == 2 + 4
    assert bytes_per_element("swiglu_backward", element_bytes=4) == 6 * 4
    assert bytes_per_element("adamw", element_bytes=2) == 44


def test_the_grids_are_complete(operands):
    watcher = Watcher()
    bench = bench_of(operands, ONCE, watcher)
    problems = attention_problems("cpu", bench.dtypes, quick=True)
    bf16 = bench_of(operands, ONCE, watcher, dtypes=["bf16"])
    measured = {
        "gemm_points": gemm.measure_gemm(bench, quick=True) + gemm.measure_gemm(bf16, quick=True),
        "attention_points": attention.measure_attention(bench, problems).points,
        "elementwise_points": elementwise.measure_elementwise(bench, quick=True)
        + elementwise.measure_elementwise(bf16, quick=True),
    }
    device = replace(CPU, **measured)
    assert all(point.forward_flops_per_s > 1e6 for point in device.gemm_points)
    begun = [subject for subject, _ in watcher.begun]
    assert begun == ["gemm", "gemm", "attention", "elementwise", "elementwise"]
    assert watcher.advanced == sum(total for _, total in watcher.begun)


def test_a_slow_device_gets_smaller_shapes(operands, monkeypatch):
    monkeypatch.setattr(KernelBench, "time_once", lambda bench, call: 10.0)
    monkeypatch.setattr(
        KernelBench, "time", lambda bench, subject, cases: dict.fromkeys(cases, Timing(1, 0.0))
    )
    bench = bench_of(operands, ONCE)
    points = gemm.measure_gemm(bench, quick=False)
    assert len({point.width for point in points}) == 2
    replace(CPU, gemm_points=points)  # has no hole


def test_operands_share_no_memory_until_they_are_given_back(operands):
    operands.begin()
    first, second = (operands.take(16, 16, dtype=torch.bfloat16) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    assert first.std() > 0.5
    operands.begin()
    assert operands.take(4, dtype=torch.bfloat16).data_ptr() == first.data_ptr()
    huge = operands.take((1 << 24) + 1, dtype=torch.bfloat16)
    assert huge.numel() == (1 << 24) + 1


def test_rates_of_the_rule_predict_the_times_they_came_from():
    flops, step_s = 2e10, 3e-4

    def timing(tokens, heads, runs, scans):
        products = runs * heads * tokens * (6 * 128**2 + 64 * 10 * 128) / flops
        return Timing(products + scans * tokens / 64 * step_s, 0.0)

    timings = {(512, heads, "forward"): timing(512, heads, 1, 1) for heads in (1, 4)}
    both = "forward and backward"
    timings |= {(512, heads, both): timing(512, heads, 3, 2) for heads in (1, 4)}
    rates = delta_rule.rule_rates(timings)
    assert (rates.rule_flops_per_s, rates.rule_step_s) == pytest.approx((flops, step_s))


def test_heads_that_take_no_time_leave_the_scan():
    rates = delta_rule.rule_rates({(512, n, "forward"): Timing(1e-3 / n, 0.0) for n in (1, 4)})
    assert 0 < rates.rule_flops_per_s <= 1e15
    assert rates.rule_step_s > 0


def test_the_rule_is_measured_as_training_calls_it(operands):
    rates = delta_rule.measure_rule(bench_of(operands, ONCE, Watcher()), quick=True)
    assert rates.rule_flops_per_s > 1e6
    assert rates.rule_step_s >= 0
