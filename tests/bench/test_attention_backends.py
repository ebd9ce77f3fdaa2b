"""Attention back ends side by side: which back end is timed on which device, and the table."""

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from sppo.bench import attention, attention_backends
from sppo.bench.attention import attention_points, measure_attention
from sppo.bench.attention_backends import (
    BackendComparison,
    BackendRate,
)
from sppo.bench.attention_grid import AttentionGrid, AttentionShape, Heads, attention_grid
from sppo.bench.timing import KernelBench, Rounds, Timing
from sppo.cli.bench_tables import attention_screen
from sppo.cli.printing import print_screen
from sppo.config.model import ModelConfig
from sppo.config.presets import PRESETS
from tests.bench.test_timing import Watcher, bench_of

ONCE = Rounds(count=1, window_s=0.0)
SMALL = AttentionGrid(queries=(8, 16), heads=Heads(4, 2), head_sizes=(16,), prefixes=(1, 3))
SPAN = AttentionShape("bf16", 4096, 32768, Heads(32, 8), 128)


def rates_of(shape, **seconds):
    """Back ends that take so long forward, and twice that backward."""
    return tuple(BackendRate(name, shape, s, 2 * s, 0.1) for name, s in seconds.items())


def measured(rates, *, automatic, left_out=None):
    return BackendComparison(
        rates, dict.fromkeys((rate.shape for rate in rates), automatic), left_out or {}
    )


def printed(found):
    console = Console(file=io.StringIO(), width=160)
    print_screen(attention_screen(found), console)
    return console.file.getvalue()


def test_every_back_end_that_works_here_is_timed_both_ways(operands):
    watcher = Watcher()
    bench = bench_of(operands, ONCE, watcher, dtypes=["bf16", "fp32"])
    found = measure_attention(bench, SMALL)
    assert found.backends == ("cpu_flash", "torch_blocks")
    assert len(found.rates) == 2 * 2 * 4
    assert watcher.begun == [("attention", 2 * len(found.rates))]
    assert len(bench.spreads) == 2 * len(found.rates)
    assert set(found.automatic.values()) == {"cpu_flash"}
    for shape, rates in found.by_shape.items():
        assert set(rates) == set(found.backends)
        assert shape.heads == Heads(4, 2)
    assert {(s.queries, s.keys) for s in found.by_shape} == {(8, 8), (8, 24), (16, 16), (16, 48)}


def test_what_is_wrong_is_left_out_with_the_reason(operands, monkeypatch):
    def error(name, case):
        return None if name == "torch_blocks" else "is wrong"

    monkeypatch.setattr(attention_backends, "error_on_a_small_case", error)
    found = measure_attention(bench_of(operands, ONCE), SMALL)
    assert found.backends == ("torch_blocks",)
    assert {(name, reason) for (name, _), reason in found.left_out.items()} == {
        ("cpu_flash", "is wrong")
    }
    assert len(found.left_out) == 4


def test_a_back_end_can_be_refused_for_some_shapes_only(operands, monkeypatch):
    monkeypatch.setattr(
        attention_backends,
        "why_not",
        lambda name, case: "takes no heads of 24" if case.head_size == 24 else None,
    )
    grid = replace(SMALL, head_sizes=(24, 16))
    found = measure_attention(bench_of(operands, ONCE, dtypes=["bf16"]), grid)
    assert {shape.head_size for shape in found.by_shape} == {16}
    assert {shape.head_size for _, shape in found.left_out} == {24}


@pytest.fixture
def clock(monkeypatch):
    """Back ends whose backward takes so many seconds per FLOP of the forward; what was tried."""
    tried = []

    def speeds(**s_per_flop):
        def probe(bench, name, shape):
            tried.append((name, shape))
            return s_per_flop[name] * shape.forward_flops

        monkeypatch.setattr(attention, "_try", probe)
        monkeypatch.setattr(
            KernelBench,
            "time",
            lambda bench, subject, cases: {
                (name, shape, way): Timing(*[s_per_flop[name] * shape.forward_flops] * 3)
                for name, shape, way in cases
            },
        )
        return tried

    return speeds


def test_a_slow_back_end_is_left_out_where_it_takes_long(operands, clock):
    grid = replace(SMALL, queries=(1024,), prefixes=(1, 2, 4))
    flops = [shape.forward_flops for shape in next(grid.problems(["fp32"]))]
    tried = clock(cpu_flash=1e-12, torch_blocks=0.199 / flops[1])
    found = measure_attention(bench_of(operands, ONCE), grid)
    kept = {r.shape.keys for r in found.rates if r.backend == "torch_blocks"}
    assert kept == {1024, 2048}
    (((name, shape), reason),) = found.left_out.items()
    assert (name, shape.keys) == ("torch_blocks", 4096)
    assert reason == "would take longer than 0.2 s a call"
    # Of that shape only as many queries were tried as take little time.
    slow = [one for name, one in tried if name == "torch_blocks"]
    assert max(one.queries for one in slow if one.keys == 4096) == 256


def test_one_with_a_fixed_cost_is_not_left_out(operands, clock, monkeypatch):
    clock(cpu_flash=1e-12, torch_blocks=1e-12)

    def with_fixed_cost(bench, name, shape):
        return 0.01 + 64e-12 * shape.forward_flops

    monkeypatch.setattr(attention, "_try", with_fixed_cost)
    grid = replace(SMALL, queries=(32, 1024), prefixes=(1, 8))
    found = measure_attention(bench_of(operands, ONCE), grid)
    assert found.left_out == {}


@pytest.mark.parametrize(("from_keys", "left"), [(48, {(16, 48)}), (0, {(8, 8), (16, 48)})])
def test_one_that_fails_on_some_shapes_loses_those_only(operands, monkeypatch, from_keys, left):
    """The largest, where its call fails; all, where already the first one does."""
    backward = attention.attention_backward

    def fails(call, *rest, backend, **options):
        if backend == "torch_blocks" and call.num_keys >= from_keys:
            raise RuntimeError("no kernel image\nis available")
        return backward(call, *rest, backend=backend, **options)

    monkeypatch.setattr(attention, "attention_backward", fails)
    found = measure_attention(bench_of(operands, ONCE), SMALL)
    assert left <= {(shape.queries, shape.keys) for _, shape in found.left_out}
    assert set(found.left_out.values()) == {"fails with RuntimeError: no kernel image"}
    assert len(found.rates) == 8 - len(found.left_out)
    assert sum(rate.backend == "cpu_flash" for rate in found.rates) == 4


def test_what_auto_takes_is_timed_however_slow(operands, clock):
    clock(cpu_flash=1.0, torch_blocks=1.0)
    found = measure_attention(bench_of(operands, ONCE), SMALL)
    assert {rate.backend for rate in found.rates} == {"cpu_flash"}
    assert len(found.by_shape) == 4


def test_a_slow_device_gets_shorter_spans(operands, clock):
    clock(cpu_flash=1.0, torch_blocks=1.0)
    grid = replace(SMALL, queries=(8, 16, 32, 64))
    found = measure_attention(bench_of(operands, ONCE), grid)
    assert {shape.queries for shape in found.by_shape} == {8, 16}
    assert len(attention_points(found)) == 4


def test_plans_get_the_rates_of_what_auto_takes(operands, clock):
    clock(cpu_flash=4e-12, torch_blocks=1e-12)
    found = measure_attention(bench_of(operands, ONCE), SMALL)
    points = attention_points(found)
    assert len(found.rates) == 2 * len(points) == 8
    assert np.allclose([point.forward_flops_per_s for point in points], 1 / 4e-12)
    assert np.allclose([point.backward_flops_per_s for point in points], 2.5 / 4e-12)


def test_grids():
    quick, whole = (attention_grid("cuda", quick=quick) for quick in (True, False))
    assert whole.heads == Heads(32, 8)
    shapes = list(next(whole.problems(["bf16"])))
    assert max(shape.keys for shape in shapes) == 8 * max(whole.queries)
    assert len(list(next(quick.problems(["bf16"])))) < len(shapes)
    of_model = attention_grid("cpu", quick=True, model=ModelConfig(**PRESETS["llama-3.2-1b"]))
    assert (of_model.heads, of_model.head_sizes) == (Heads(32, 8), (64,))
    assert str(SPAN) == "bf16, 4Ki queries at the end of 32Ki keys, 32/8 heads of 128"


def test_flops_are_causal_and_json_is_flat():
    rate = BackendRate("cudnn", SPAN, 2e-3, 4e-3, 0.25)
    pairs = 4096 * (32768 - 4096) + 4096 * 4097 / 2
    assert rate.as_json() == {
        "backend": "cudnn",
        "dtype": "bf16",
        "queries": 4096,
        "keys": 32768,
        "heads": 32,
        "kv_heads": 8,
        "head_size": 128,
        "forward_s": 2e-3,
        "backward_s": 4e-3,
        "forward_flops_per_s": pytest.approx(4 * 32 * 128 * pairs / 2e-3),
        "backward_flops_per_s": pytest.approx(10 * 32 * 128 * pairs / 4e-3),
        "spread": 0.25,
    }


def test_the_table_has_a_column_per_back_end_and_says_why_there_are_gaps():
    short = replace(SPAN, queries=1024, keys=1024)
    rates = rates_of(short, cudnn=2e-5, torch_blocks=1e-4) + rates_of(SPAN, cudnn=4e-3)
    gaps = {
        ("torch_blocks", SPAN): "would take longer than 0.05 s a call",
        ("torch_flash", short): "is wrong",
        ("torch_flash", SPAN): "is wrong",
    }
    text = printed(measured(rates, automatic="cudnn", left_out=gaps))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "Attention over visible pairs, TFLOP/s, measured: forward / backward" in text
    assert "dtype heads size queries keys cudnn torch_blocks" in lines
    assert "bf16 32/8 128 1Ki 1Ki 430 / 537 * 86 / 107" in lines
    assert "bf16 32/8 128 4Ki 32Ki 515 / 644 * –" in lines
    assert "– torch_blocks would take longer than 0.05 s a call: 1 shape" in lines
    assert "– torch_flash is wrong: 2 shapes" in lines
