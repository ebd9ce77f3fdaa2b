"""Copies that overlap compute: what they cost, and a real run of both."""

import time

import pytest
import torch

from sppo.bench import overlap
from sppo.bench.hardware_description import describe
from sppo.bench.overlap import (
    OverlapMeasurements,
    OverlapPoint,
    added_s_per_byte,
    measure_overlap,
)
from sppo.bench.suite import Measurements
from sppo.cli.bench_tables import overlap_screen
from sppo.hardware.presets import PRESETS
from sppo.offload.disk import file_tier
from tests.bench.test_timing import Watcher

TOKEN_S, COPY_S = 1e-6, 5e-6
"""Seconds of compute and of a copy per token."""


def point(tokens, context, *, slower=1.0):
    compute_s = TOKEN_S * tokens
    return OverlapPoint(
        tokens, context, 1000 * tokens, compute_s, COPY_S * tokens, compute_s * slower, 0.0
    )


OVERLAP = OverlapMeasurements(
    "tiny",
    "bf16",
    "to a disk",
    (point(256, 0), point(1024, 0), point(256, 500)),
    2e-10,
)


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


def test_a_slow_device_gets_shorter_units(operands, small, tmp_path, monkeypatch):
    """Of three times three units only the short ones take less than a second."""
    tried = []

    def warm_s(unit):
        tried.append((unit.tokens, unit.context))
        return unit.tokens * (unit.context + 100) / 1e5

    monkeypatch.setattr(overlap._ForwardWork, "warm_s", warm_s)
    monkeypatch.setattr(overlap, "_measure", lambda unit, *_, quick: point(*tried[-1]))
    monkeypatch.setattr(overlap, "_TOKENS", {"cpu": (64, 128, 256)})
    monkeypatch.setattr(overlap, "_CONTEXTS", {"cpu": (0, 512, 1024)})
    watcher = Watcher()
    found = measure_overlap(operands, small, directory=tmp_path, quick=False, watcher=watcher)
    measured = [(point.tokens, point.context) for point in found.points]
    assert measured == [(64, 0), (64, 512), (64, 1024), (128, 0), (128, 512), (256, 0)]
    assert found.left_out == ((128, 1024, "1.44 s a unit"), (256, 512, "1.57 s a unit"))
    assert (256, 1024) not in tried
    assert watcher.advanced == 9
    assert "left out: 128 tokens after 1Ki, and longer: 1.44 s a unit" in overlap_screen(found)


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
