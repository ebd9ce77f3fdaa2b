"""The looped order on one rank: stage by stage, in float64, against autograd on whole sequences."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sppo.engine.pipeline import Pipeline
from tests.engine.models import (
    Trained,
    assert_equal_bits,
    assert_same_step,
    autograd_step,
    random_sequence,
    random_weights,
    tiny_model,
)
from tests.engine.offloading import RatioRows, offloading_trained
from tests.tiers import each_once, examples

VARIANTS = ("gqa, q/k-norm", "mqa, window, biases", "tied, yarn, all biases")


def looped(virtual):
    return Pipeline("looped_bfs", num_virtual=virtual)


@st.composite
def cut_sequences(draw):
    """Cuts of one to three sequences of different lengths."""
    cuts = []
    for _ in range(draw(st.integers(1, 3))):
        inner = draw(st.sets(st.integers(1, 22), max_size=5))
        cuts.append((0, *sorted(inner), 23 + len(cuts)))
    return cuts


def sequences_of(model, cuts, starts):
    """One random sequence for each of ``cuts``, of documents that begin at ``starts``."""
    return [random_sequence(model, c[-1], seed=n, starts=starts) for n, c in enumerate(cuts)]


@settings(deadline=None, max_examples=examples(6, all=25))
@given(
    variant=st.sampled_from(VARIANTS),
    layers=st.integers(1, 5),
    data=st.data(),
    policy=st.sampled_from(("retain", "keep_attention", "recompute")),
    cuts=cut_sequences(),
)
def test_gradients_stage_by_stage(variant, layers, data, policy, cuts):
    virtual = data.draw(st.integers(1, layers))
    every = data.draw(st.integers(1, 3))
    starts = data.draw(st.sampled_from([(0,), (0, 5, 11)]))
    model = tiny_model(variant, num_layers=layers)
    weights = random_weights(model)
    sequences = sequences_of(model, cuts, starts)
    trained = Trained(model, weights, policy=policy, pipeline=looped(virtual), input_every=every)
    found = trained.step(sequences, cuts)
    assert_same_step(found, autograd_step(model, weights, sequences), tolerance=1e-10)


@pytest.mark.parametrize("queues", ["lazy", "random 1", "threads"])
@pytest.mark.parametrize(("virtual", "ratio"), each_once([2, 4], [0.4, 1.0]))
def test_offloading_changes_no_bit(virtual, ratio, queues, tmp_path):
    model = tiny_model("gqa, q/k-norm", num_layers=5)
    weights = random_weights(model)
    data = [random_sequence(model, length, seed=length) for length in (23, 17)]
    cuts = [(0, 4, 9, 17, 23), (0, 8, 17)]
    rows = RatioRows(model, 8, ratio, last_too=True, alignment=1)
    pipeline = looped(virtual)
    placements = dict.fromkeys(range(virtual), rows)
    offloading = offloading_trained(
        model,
        weights,
        rows,
        placements=placements,
        directory=tmp_path,
        queues=queues,
        pipeline=pipeline,
    )
    for _ in range(2):
        assert_equal_bits(
            offloading.step(data, cuts),
            Trained(model, weights, pipeline=pipeline).step(data, cuts),
        )
    offloading.engine.close()


@settings(
    deadline=None,
    max_examples=examples(6, all=25),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    variant=st.sampled_from(VARIANTS),
    layers=st.integers(1, 5),
    data=st.data(),
    policy=st.sampled_from(("retain", "keep_attention", "recompute")),
    cuts=cut_sequences(),
)
def test_keys_that_leave_and_come_back_change_no_bit(variant, layers, data, policy, cuts, tmp_path):
    virtual = data.draw(st.integers(1, layers))
    leaving = data.draw(st.sets(st.integers(0, virtual - 1), min_size=1))
    every = data.draw(st.integers(1, 3))
    ratio = data.draw(st.sampled_from((0.0, 0.5, 1.0)))
    starts = data.draw(st.sampled_from([(0,), (0, 5, 11)]))
    queues = data.draw(st.sampled_from(("lazy", "random 0", "random 1", "eager")))
    model = tiny_model(variant, num_layers=layers)
    weights = random_weights(model)
    sequences = sequences_of(model, cuts, starts)
    rows = RatioRows(model, 8, ratio, rest=policy, last_too=True, alignment=1, input_every=every)
    how = {
        "placements": dict.fromkeys(range(virtual), rows),
        "directory": tmp_path,
        "queues": queues,
        "pipeline": looped(virtual),
        "input_every": every,
    }
    away = offloading_trained(model, weights, rows, kv_offloaded=leaving, **how)
    kept = offloading_trained(model, weights, rows, **how)
    for _ in range(2):
        assert_equal_bits(away.step(sequences, cuts), kept.step(sequences, cuts))
        report = away.engine.take_copies()
        layers_away = sum(
            len(held)
            for stage, held in looped(virtual).layers(model.num_layers).items()
            if stage in leaving
        )
        of_a_token = 2 * model.kv_heads * model.head_dim * 8
        whole = layers_away * of_a_token * sum(c[-1] for c in cuts)
        assert report.out_bytes["kv"] == report.back_bytes["kv"] == whole
    found = away.step(sequences, cuts)
    assert_same_step(found, autograd_step(model, weights, sequences), tolerance=1e-10)
    away.engine.close()
    kept.engine.close()


@settings(deadline=None, max_examples=examples(6, all=25))
@given(
    variant=st.sampled_from(VARIANTS),
    layers=st.integers(1, 5),
    data=st.data(),
    policy=st.sampled_from(("retain", "keep_attention", "recompute")),
    cuts=cut_sequences(),
)
def test_recomputed_keys_change_no_bit(variant, layers, data, policy, cuts):
    virtual = data.draw(st.integers(1, layers))
    stages = data.draw(st.sets(st.integers(0, virtual - 1), min_size=1))
    starts = data.draw(st.sampled_from([(0,), (0, 5, 11)]))
    model = tiny_model(variant, num_layers=layers)
    weights = random_weights(model)
    sequences = sequences_of(model, cuts, starts)
    how = {"policy": policy, "pipeline": looped(virtual)}
    again = Trained(model, weights, kv_recomputed=stages, **how)
    kept = Trained(model, weights, **how)
    for _ in range(2):
        assert_equal_bits(again.step(sequences, cuts), kept.step(sequences, cuts))
    assert again.engine.take_peaks().kv_bytes <= kept.engine.take_peaks().kv_bytes


def test_gradients_of_keys_exist_on_one_stage_at_a_time():
    model = tiny_model("gqa, q/k-norm", num_layers=4)
    weights = random_weights(model)
    data, cuts = [random_sequence(model, 24)], [(0, 8, 16, 24)]
    peaks = {}
    for virtual in (1, 2, 4):
        trained = Trained(model, weights, pipeline=looped(virtual))
        trained.step(data, cuts)
        peaks[virtual] = trained.engine.take_peaks().kv_bytes
    of_a_layer = 2 * 24 * model.kv_heads * model.head_dim * 8
    assert peaks == {v: (4 + 4 // v) * of_a_layer for v in peaks}


def test_two_stages_have_their_keys_on_the_device_at_once(tmp_path):
    model = tiny_model("gqa, q/k-norm", num_layers=4)
    weights = random_weights(model)
    data, cuts = [random_sequence(model, 24)], [(0, 8, 16, 24)]
    rows = RatioRows(model, 8, 0.0, rest="recompute")
    trained = offloading_trained(
        model,
        weights,
        rows,
        placements=dict.fromkeys(range(4), rows),
        kv_offloaded=range(3),
        directory=tmp_path,
        pipeline=looped(4),
    )
    trained.step(data, cuts)
    trained.engine.close()
    of_a_layer = 2 * 24 * model.kv_heads * model.head_dim * 8
    assert trained.engine.take_peaks().kv_bytes == 3 * of_a_layer


def test_evaluation_takes_the_same_order():
    model = tiny_model("gqa, q/k-norm", num_layers=3)
    weights = random_weights(model)
    data, cuts = random_sequence(model, 23), (0, 4, 9, 23)
    found = Trained(model, weights, pipeline=looped(3)).engine.evaluate(data, cuts)
    assert torch.equal(found, Trained(model, weights).engine.evaluate(data, cuts))
