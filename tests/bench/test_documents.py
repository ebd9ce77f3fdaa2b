"""Short documents: what each adds to a call of attention is measured, described and priced."""

from dataclasses import replace

import numpy as np
import pytest

from sppo.bench.attention import DocumentSeconds, measure_documents
from sppo.bench.hardware_description import describe
from sppo.bench.operands import Operands
from sppo.bench.suite import Measurements
from sppo.bench.timing import KernelBench, Rounds, Timing
from sppo.cost.layer import attention_seconds
from sppo.cost.layer_kinds import kinds_of_model
from sppo.cost.packed_sequence import PackedSequence, parts_of_packed
from sppo.cost.trainable import EVERYTHING
from sppo.cost.workload import Workload
from sppo.hardware.presets import PRESETS
from sppo.hardware.rates import AttentionPoint
from tests.bench.test_timing import bench_of
from tests.planning.cases import run_config

RATE = 1e11
POINTS = tuple(
    AttentionPoint("fp32", 64, queries, keys, RATE, RATE)
    for queries in (256, 1024)
    for keys in (queries, 2 * queries)
)
DEVICE = replace(
    PRESETS["laptop-cpu"].device,
    attention_points=POINTS,
    document_forward_s=1e-4,
    document_backward_s=3e-4,
)


def test_documents_are_timed_one_by_one(monkeypatch):
    def time(bench, subject, cases):
        assert subject == "documents"
        for make in cases.values():
            make()()
        seconds = {"forward": 64e-5, "backward": 128e-5}
        return {key: Timing(seconds[key[1]], 0.0) for key in cases}

    monkeypatch.setattr(KernelBench, "time", time)
    found = measure_documents(bench_of(Operands("cpu"), Rounds()))
    assert found == DocumentSeconds(pytest.approx(1e-5), pytest.approx(2e-5))


def test_a_description_has_the_seconds():
    measured = Measurements("cpu", documents=DocumentSeconds(2e-5, 5e-5))
    device = describe(PRESETS["laptop-cpu"], measured).device
    assert (device.document_forward_s, device.document_backward_s) == (2e-5, 5e-5)


@pytest.mark.parametrize(("queries", "share"), [(0, 1.0), (128, 0.75), (256, 0.0), (900, 0.0)])
def test_rates_include_the_calls_of_measured_spans(queries, share):
    asked = np.array([float(queries)])
    for backward, each_s in ((False, 1e-4), (True, 3e-4)):
        found = DEVICE.document_seconds("fp32", queries=asked, backward=backward)
        np.testing.assert_allclose(found, share * each_s)
    assert not DEVICE.document_seconds("bf16", queries=asked, backward=True).any()


def test_a_packed_subsequence_pays_for_each_of_its_documents():
    def seconds(samples, device):
        hardware = replace(PRESETS["laptop-cpu"], device=device)
        workload = Workload(run_config("tiny").model, hardware, dtype="fp32")
        parts = parts_of_packed([PackedSequence(samples, (sum(samples),))])
        (kind,) = kinds_of_model(workload.model, EVERYTHING)
        return [way.sum() for way in attention_seconds(workload, parts, kind=kind)]

    free = replace(DEVICE, document_forward_s=0.0, document_backward_s=0.0)
    for place, each_s in ((0, 1e-4), (1, 3e-4)):
        for samples, calls in (((16,) * 32, 32 * (1 - 1 / 256)), ((512,), 0)):
            added = seconds(samples, DEVICE)[place] - seconds(samples, free)[place]
            assert added == pytest.approx(calls * each_s, abs=1e-12)
