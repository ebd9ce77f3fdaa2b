"""Attention back ends side by side."""

import io

from rich.console import Console

from sppo.bench import attention_backends
from sppo.bench.attention_backends import Span, measure_backends
from sppo.bench.operands import Operands
from sppo.bench.report import print_measurements
from sppo.bench.suite import Measurements
from sppo.bench.timing import Rounds, Timing
from tests.bench.test_timing import Watcher

ONCE = Rounds("cpu", count=1, window_s=0.0)
SMALL = Span(queries=16, keys=48, heads=4, kv_heads=2, head_size=16)


def test_what_works_here_is_timed(monkeypatch):
    why_not = attention_backends.why_not
    monkeypatch.setattr(
        attention_backends,
        "why_not",
        lambda name, case: "is slow here" if name == "triton" else why_not(name, case),
    )
    watcher = Watcher()
    timings = measure_backends(Operands("cpu"), rounds=ONCE, watcher=watcher, span=SMALL)
    names = ("cpu_flash", "torch_blocks")
    assert list(timings) == [(name, way) for name in names for way in ("forward", "backward")]
    assert all(timing.median_s > 0 for timing in timings.values())
    assert watcher.begun == [("attention back ends", 4)]


def test_what_is_wrong_is_not_timed(monkeypatch):
    def error(name, case):
        return None if name == "torch_blocks" else "is wrong"

    monkeypatch.setattr(attention_backends, "error_on_a_small_case", error)
    timings = measure_backends(Operands("cpu"), rounds=ONCE, watcher=Watcher(), span=SMALL)
    assert {name for name, _ in timings} == {"torch_blocks"}


def test_the_table():
    keys = [("triton", "forward"), ("triton", "backward")]
    timings = dict(zip(keys, (Timing(2e-3, 1e-3, 3e-3), Timing(7e-3, 7e-3, 7e-3)), strict=True))
    measured = Measurements("cuda", (), (), (), (0.1,), 1.0, backends=timings)
    console = Console(file=io.StringIO(), width=120)
    print_measurements(measured, console=console)
    text = " ".join(console.file.getvalue().split())
    assert "measured: 4Ki queries at the end of 32Ki keys, bf16, 32 heads of 128 on 8" in text
    assert "triton 2.0 ms 7.0 ms" in text
