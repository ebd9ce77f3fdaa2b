"""Attention: which shapes are timed on which device, what plans get, and the table."""

import pytest

from sppo.bench.attention import (
    AttentionRates,
    AttentionShape,
    Heads,
    attention_points,
    attention_problems,
    measure_attention,
)
from sppo.bench.timing import KernelBench, Rounds, Timing
from sppo.cli.bench_tables import attention_screen
from sppo.config.model import ModelConfig
from sppo.config.model.presets import PRESETS
from tests.bench.test_timing import Watcher, bench_of

ONCE = Rounds(count=1, window_s=0.0)
SPAN = AttentionShape("bf16", 4096, 32768, Heads(32, 8), 128)


def spans(*queries, dtype="fp32"):
    return [
        AttentionShape(dtype, count, prefix * count, Heads(4, 2), 16)
        for count in queries
        for prefix in (1, 3)
    ]


def test_what_auto_takes_is_timed_both_ways(operands):
    watcher = Watcher()
    bench = bench_of(operands, ONCE, watcher)
    found = measure_attention(bench, [spans(8, 16), spans(8, 16, dtype="bf16")])
    assert found.backends == {("fp32", 16): "cpu_flash", ("bf16", 16): "cpu_flash"}
    lengths = [(point.dtype, point.queries, point.keys) for point in found.points]
    assert lengths[:4] == [("fp32", 8, 8), ("fp32", 8, 24), ("fp32", 16, 16), ("fp32", 16, 48)]
    assert len(lengths) == 8
    assert watcher.begun == [("attention", 16)]
    assert len(bench.spreads) == 16


def test_a_slow_device_gets_shorter_spans(operands, monkeypatch):
    monkeypatch.setattr(KernelBench, "time_once", lambda bench, call: 1.0)
    found = measure_attention(bench_of(operands, ONCE), [spans(8, 16, 32, 64)])
    assert {point.queries for point in found.points} == {8, 16}


def test_rates_are_over_visible_pairs():
    timings = {(SPAN, "forward"): Timing(2e-3, 0.0), (SPAN, "backward"): Timing(4e-3, 0.0)}
    (point,) = attention_points(timings)
    pairs = 4096 * (32768 - 4096) + 4096 * 4097 / 2
    assert (point.dtype, point.head_size, point.queries, point.keys) == ("bf16", 128, 4096, 32768)
    assert point.forward_flops_per_s == pytest.approx(4 * 32 * 128 * pairs / 2e-3)
    assert point.backward_flops_per_s == pytest.approx(10 * 32 * 128 * pairs / 4e-3)


def test_grids():
    quick, whole = (
        attention_problems("cuda", ["bf16", "fp32"], quick=quick) for quick in (True, False)
    )
    assert [(problem[0].dtype, problem[0].head_size) for problem in whole] == [
        ("bf16", 64), ("bf16", 128), ("fp32", 64), ("fp32", 128),
    ]  # fmt: skip
    assert whole[0][0].heads == Heads(32, 8)
    assert max(shape.keys for shape in whole[0]) == 8 * 16384
    assert sum(map(len, quick)) < sum(map(len, whole))
    model = ModelConfig(**PRESETS["llama-3.2-1b"])
    (of_model,) = attention_problems("cpu", ["bf16"], quick=True, model=model)
    assert (of_model[0].heads, of_model[0].head_size) == (Heads(32, 8), 64)


def test_the_table_has_a_row_per_span_and_a_column_per_ratio():
    seconds = {(4096, 32768): 4e-3, (1024, 1024): 2e-5, (1024, 8192): 3e-4}
    timings = {}
    for (queries, keys), forward_s in seconds.items():
        shape = AttentionShape("bf16", queries, keys, Heads(32, 8), 128)
        timings[shape, "forward"] = Timing(forward_s, 0.0)
        timings[shape, "backward"] = Timing(2 * forward_s, 0.0)
    found = AttentionRates(Heads(32, 8), {("bf16", 128): "cudnn"}, attention_points(timings))
    title, table = attention_screen(found)
    assert "Attention of 32/8 heads over visible pairs, TFLOP/s, measured" in title
    columns = {column.header: list(column.cells) for column in table.columns}
    assert columns["back end"] == ["cudnn", "cudnn"]
    assert columns["queries"] == ["4Ki", "1Ki"]
    assert columns["8x keys"] == ["515 / 644", "430 / 537"]
    assert columns["1x keys"] == ["–", "430 / 537"]
