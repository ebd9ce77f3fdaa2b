"""The looped order on one rank, stage by stage: which keys are on the device, and which move."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sppo.engine.pipeline import Pipeline
from tests.engine.models import Trained, random_sequence, random_weights, tiny_model
from tests.engine.offloading import RatioRows, offloading_trained

CUTS = [(0, 8, 16, 24)]


def looped(virtual):
    return Pipeline("looped_bfs", num_virtual=virtual)


@pytest.fixture(scope="module")
def model():
    return tiny_model("gqa, q/k-norm", num_layers=4)


def step(trained, model):
    return trained.step([random_sequence(model, 24)], CUTS)


def kv_bytes(model):
    """K and V of one layer."""
    return 2 * 24 * model.kv_heads * model.head_dim * 8


def test_gradients_of_keys_exist_on_one_stage_at_a_time(model):
    peaks = {}
    for virtual in (1, 2, 4):
        trained = Trained(model, random_weights(model), pipeline=looped(virtual))
        step(trained, model)
        peaks[virtual] = trained.engine.take_peaks().kv_bytes
    assert peaks == {v: (4 + 4 // v) * kv_bytes(model) for v in peaks}


def test_two_stages_have_their_keys_on_the_device_at_once(model, tmp_path):
    rows = RatioRows(model, 8, 0.0, rest="recompute")
    trained = offloading_trained(
        model,
        random_weights(model),
        rows,
        directory=tmp_path,
        pipeline=replace(looped(4), kv_offloaded=range(3)),
    )
    step(trained, model)
    trained.engine.close()
    assert trained.engine.take_peaks().kv_bytes == 3 * kv_bytes(model)
    moved = trained.engine.take_copies()
    assert moved.out_bytes["kv"] == moved.back_bytes["kv"] == 3 * kv_bytes(model)


def test_recomputed_keys_are_on_the_device_one_stage_at_a_time(model):
    pipeline = replace(looped(4), kv_recomputed=range(3))
    again = Trained(model, random_weights(model), pipeline=pipeline)
    step(again, model)
    assert again.engine.take_peaks().kv_bytes < (4 + 1) * kv_bytes(model)
