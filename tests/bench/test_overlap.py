"""Copies that overlap compute: what they cost, and a real run of both."""

import io
import time
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from sppo.bench import overlap
from sppo.bench.hardware_description import describe
from sppo.bench.overlap import (
    OverlapMeasurements,
    OverlapPoint,
    added_s_per_byte,
    measure_overlap,
)
from sppo.bench.suite import Measurements
from sppo.cli.bench_tables import overlap_screen, unsteady_line
from sppo.cli.printing import print_screen
from sppo.hardware.presets import PRESETS
from sppo.offload.disk import file_tier
from tests.bench.test_timing import Watcher

PRODUCTS_S, PAIR_S, COPY_S = 1e-6, 1e-8, 5e-6
"""Per token, per (query, key) pair, per token."""


def point(tokens, context, *, slower=1.0):
    """A unit whose time grows with its tokens and its pairs."""
    attention = PAIR_S * tokens * (context + tokens / 2)
    products = PRODUCTS_S * tokens
    return OverlapPoint(
        tokens,
        context,
        1000 * tokens,
        products,
        attention,
        COPY_S * tokens,
        products * slower,
        attention * slower,
        0.0,
    )


OVERLAP = OverlapMeasurements(
    "tiny",
    "bf16",
    "to a disk",
    (point(256, 0), point(1024, 0), point(256, 500)),
    2e-10,
)


def test_a_narrow_terminal_cuts_no_word():
    console = Console(file=io.StringIO(), width=80)
    far = point(65536, 1 << 20, slower=1.684)
    print_screen(overlap_screen(replace(OVERLAP, points=(*OVERLAP.points, far))), console)
    text = console.file.getvalue()
    assert "…" not in text
    heading = next(line for line in text.splitlines() if line.startswith(" tokens"))
    assert heading.split()[-3:] == ["change", "products", "attention"]


def test_unsteady_timings_are_said_not_to_be_planned_with():
    assert unsteady_line([0.02, 0.1, 3.0]) is None
    assert "half of the timings lay more than 164% apart" in unsteady_line([0.1, 1.64, 2.0])


def test_what_copies_cost_is_within_reason():
    assert added_s_per_byte([point(256, 0)]) == 0.0
    assert added_s_per_byte([point(256, 0, slower=0.9)]) == 0.0
    slower = point(256, 0, slower=1.5)
    added = slower.compute_copying_s - slower.compute_s
    assert added_s_per_byte([slower]) == pytest.approx(added / slower.moved_bytes)
    # Compute cannot lose more than the time that copies take.
    assert added_s_per_byte([point(256, 0, slower=99)]) == pytest.approx(COPY_S / 1000)
    nothing = Measurements("cpu", overlap=OVERLAP)
    assert describe(PRESETS["laptop-cpu"], nothing).node.copy_compute_s_per_byte == 2e-10


def test_a_real_layer_and_a_real_disk(operands, small, tmp_path):
    watcher = Watcher()
    found = measure_overlap(operands, small, directory=tmp_path, quick=True, watcher=watcher)
    assert watcher.advanced == sum(total for _, total in watcher.begun) == len(found.points)
    assert list(tmp_path.iterdir()) == []
    # x_in, q, o, x_mid of 64, up and gate of 128, bf16; lse of 4 heads, fp32.
    assert {p.moved_bytes / p.tokens for p in found.points} == {2 * (4 * 64 + 2 * 128) + 4 * 4}
    for measured in found.points:
        times = (measured.compute_s, measured.copy_s, measured.compute_copying_s)
        assert min(times) > 0 <= measured.exposed_s


def test_copies_that_take_longer_than_compute_are_exposed(operands, small, tmp_path, monkeypatch):
    """A disk that needs 60 ms for each of two writes at once, behind a unit that takes less."""
    system_io = file_tier._system_io

    def slow(*arguments):
        time.sleep(0.06)
        return system_io(*arguments)

    monkeypatch.setattr(file_tier, "_system_io", slow)
    monkeypatch.setattr(overlap, "_MOST_UNITS", 4)
    monkeypatch.setattr(overlap, "_QUICK_TOKENS", {"cpu": (64,)})
    monkeypatch.setattr(overlap, "_QUICK_CONTEXTS", {"cpu": (0,)})
    (found,) = measure_overlap(
        operands, small, directory=tmp_path, quick=True, watcher=Watcher()
    ).points
    assert found.copy_s >= 0.03
    waited = found.exposed_s + found.compute_copying_s
    assert waited >= 0.03
    assert found.exposed_s > 0.01


def test_a_slow_device_gets_shorter_units(operands, small, monkeypatch):
    monkeypatch.setattr(overlap._ForwardWork, "time", lambda unit, units: (0.1, 0.8))
    shapes, left_out = overlap._shapes(operands, replace(small, dtype="fp32"), quick=False)
    assert set(shapes) == {(256, 0), (256, 4096), (256, 16384), (1024, 0)}
    assert len(left_out) == 5
    assert left_out[0][:2] == (1024, 4096)
    lines = list(overlap_screen(replace(OVERLAP, left_out=tuple(left_out))))
    assert "left out: 1Ki tokens after 4Ki, would take 1.29 s a unit" in lines


def test_what_the_device_has_no_memory_for_is_left_out(operands, small, tmp_path, monkeypatch):
    whole = overlap.attention_forward

    def attend(call):
        if call.num_keys > 300:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(call)

    monkeypatch.setattr(overlap, "attention_forward", attend)
    monkeypatch.setattr(overlap, "_QUICK_CONTEXTS", {"cpu": (0, 128)})
    options = {"directory": tmp_path, "quick": True, "watcher": Watcher()}
    found = measure_overlap(operands, small, **options)
    assert [(p.tokens, p.context) for p in found.points] == [(128, 0), (128, 128), (256, 0)]
    assert found.left_out == ((256, 128, "more memory than the device has"),)
    monkeypatch.setattr(overlap, "_QUICK_TOKENS", {"cpu": (512,)})
    with pytest.raises(torch.OutOfMemoryError):
        measure_overlap(operands, small, **options)
