"""Adapters and frozen weights on one rank: gradients of what trains, by autograd in float64."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sppo.activations.policy import POLICIES
from sppo.config.adapter import TARGETS, AdapterConfig
from sppo.cost.trainable import trainable_of
from sppo.engine.pipeline import Pipeline
from sppo.kernels import half_products
from sppo.model.attention_mixer import AttentionMixer
from sppo.model.layer import Layer
from sppo.model.projection import Projection
from tests.engine.models import (
    VARIANTS,
    Trained,
    assert_equal_bits,
    assert_same_step,
    autograd_step,
    random_sequence,
    random_weights,
    tiny_model,
)
from tests.engine.offloading import RatioRows, offloading_trained
from tests.tiers import examples

LENGTHS = (23, 17)
ONLY = (
    ("head.*", "final_norm.*"),  # of a tied model only the norm
    ("*norm*",),
    ("layers.[12].*",),
    ("layers.2.down.*", "layers.1.k.*"),
    ("embed.*",),
    ("positions.*", "layers.1.*"),
    ("*.bias", "final_norm.weight"),
    ("*",),
)
PIPELINES = {
    "one stage": Pipeline(),
    "inputs of every second layer": Pipeline(input_every=2),
    "inputs of every third layer": Pipeline(input_every=3),
    "weight gradients deferred": Pipeline("seq_zb_h1"),
    "looped": Pipeline("looped_bfs", num_virtual=2),
    "looped, keys recomputed": Pipeline("looped_bfs", num_virtual=2, kv_recomputed=range(1)),
}


def sequences_of(model, *, seed=0):
    first, second = LENGTHS
    return [
        random_sequence(model, first, seed=seed, starts=(0, 9)),
        random_sequence(model, second, seed=seed + 1, ignored=0.6),
    ]


@st.composite
def trainables(draw, model):
    """Adapters of some targets and layers, or globs; something trains."""
    if draw(st.booleans()):
        layers = draw(st.none() | st.sets(st.integers(0, model.num_layers - 1), min_size=1))
        adapter = AdapterConfig(
            rank=draw(st.sampled_from((1, 3, 12))),
            alpha=draw(st.sampled_from((None, 0.7, 5))),
            scaling=draw(st.sampled_from(("standard", "rank_stabilized"))),
            targets=draw(st.none() | st.sets(st.sampled_from(TARGETS), min_size=1).map(sorted)),
            layers=None if layers is None else sorted(layers),
            also_train=draw(st.sets(st.sampled_from(("norms", "embed", "head"))).map(sorted)),
        )
        found = trainable_of(adapter, None, model=model)
    else:
        found = trainable_of(None, draw(st.sampled_from(ONLY)), model=model)
    assume(found.trained_shapes(model))
    return found


def cuts_of(draw):
    return [
        (0, *sorted(draw(st.sets(st.integers(1, length - 1), max_size=3))), length)
        for length in LENGTHS
    ]


@settings(deadline=None, max_examples=examples(60, all=1500))
@given(data=st.data())
def test_gradients_of_what_trains_are_those_of_autograd(data):
    draw = data.draw
    variant = draw(st.sampled_from(sorted(VARIANTS)))
    model = tiny_model(variant, num_layers=draw(st.integers(3, 4)))
    trainable = draw(trainables(model))
    cuts, name = cuts_of(draw), draw(st.sampled_from(sorted(PIPELINES)))
    options = {"policy": draw(st.sampled_from(sorted(POLICIES))), "trainable": trainable}
    weights = random_weights(model, seed=draw(st.integers(0, 9)), trainable=trainable)
    before = {name: weight.clone() for name, weight in weights.items()}
    sequences = sequences_of(model)
    expected = autograd_step(model, weights, sequences, trainable=trainable)
    trained = Trained(model, weights, pipeline=PIPELINES[name], **options)
    assert_same_step(trained.step(sequences, cuts), expected, tolerance=1e-9)
    assert all(torch.equal(before[name], weight) for name, weight in weights.items())


@settings(deadline=None, max_examples=examples(12, all=200))
@given(data=st.data())
def test_offloading_changes_no_bit(data):
    draw = data.draw
    model = tiny_model(draw(st.sampled_from(sorted(VARIANTS))), num_layers=4)
    trainable = draw(trainables(model))
    cuts, every = cuts_of(draw), draw(st.sampled_from((1, 2)))
    rows = RatioRows(
        model,
        8,
        draw(st.sampled_from((0.3, 0.8, 1.0))),
        last_too=draw(st.booleans()),
        input_every=every,
    )
    looped = Pipeline("looped_bfs", num_virtual=2, kv_offloaded=range(1))
    pipeline = draw(st.sampled_from((Pipeline(input_every=every), looped)))
    weights = random_weights(model, trainable=trainable)
    sequences = sequences_of(model)
    kept = Trained(model, weights, trainable=trainable).step(sequences, cuts)
    moving = offloading_trained(model, weights, rows, pipeline=pipeline, trainable=trainable)
    assert_equal_bits(moving.step(sequences, cuts), kept)
    moving.engine.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_layers_without_a_backward_hold_nothing_after_their_forward(policy):
    model, cuts = tiny_model(num_layers=5), [(0, 8, 16, 24)]
    trainable = trainable_of(None, ("layers.3.*",), model=model)
    held = {}
    for trains in (trainable, trainable_of(None, None, model=model)):
        made = Trained(model, random_weights(model), policy=policy, trainable=trains)
        made.step([random_sequence(model, 24)], cuts)
        held[trains] = made.engine.take_peaks()
    some, all_of_them = held.values()
    dx = 24 * model.hidden_size * 8
    assert 5 * (some.activations_bytes - dx) == 2 * (all_of_them.activations_bytes - dx)
    kv = 2 * 24 * model.kv_heads * model.head_dim * 8
    assert (some.kv_bytes, all_of_them.kv_bytes) == (5 * kv, 10 * kv)


@contextmanager
def without_adapters(part, function):
    """A function of the layer or of its mixer computes with the weights alone."""
    unchanged = getattr(part, function)

    def forgetful(self, *arguments, **options):
        holder = self.heads if part is AttentionMixer else self
        weights = {name: w for name, w in holder.weights.items() if ".lora_" not in name}
        bare = replace(holder, weights=weights)
        bare = replace(self, heads=bare) if part is AttentionMixer else bare
        return unchanged(bare, *arguments, **options)

    with patch.object(part, function, forgetful):
        yield


def unscaled(function):
    """A function of the projection computes with a scale of one."""
    unchanged = getattr(Projection, function)
    return patch.object(
        Projection, function, lambda self, x: unchanged(replace(self, scale=1.0), x)
    )


DEFECTS = {
    "scale forgotten": lambda: unscaled("inner"),
    "gradient of A not scaled": lambda: unscaled("backward"),
    **{
        f"{part.__name__}.{function} without adapters": partial(without_adapters, part, function)
        for part, function in (
            (AttentionMixer, "recompute_kv"),
            (AttentionMixer, "recompute_missing_rows"),
            (AttentionMixer, "output"),
            (AttentionMixer, "_queries"),
            (AttentionMixer, "_projected_keys"),
            (Layer, "recompute_output"),
            (Layer, "recompute_missing_rows"),
            (Layer, "_mlp_backward"),
        )
    },
}


def faults_of_recomputing_steps():
    """Wrong gradients of steps that recompute all there is to recompute."""
    model = tiny_model("gqa, q/k-norm", num_layers=4)
    trainable = trainable_of(AdapterConfig(rank=3, alpha=2), None, model=model)
    weights = random_weights(model, trainable=trainable)
    cuts, sequences = [(0, 5, 23), (0, 17)], sequences_of(model)
    expected = autograd_step(model, weights, sequences, trainable=trainable)
    for made in (
        Trained(
            model,
            weights,
            policy="recompute",
            pipeline=Pipeline("looped_bfs", num_virtual=2, kv_recomputed=range(1)),
            trainable=trainable,
        ),
        Trained(
            model,
            weights,
            policy="keep_attention",
            pipeline=Pipeline(input_every=2),
            trainable=trainable,
        ),
        offloading_trained(
            model, weights, RatioRows(model, 8, 0.7, rest="recompute"), trainable=trainable
        ),
    ):
        try:
            assert_same_step(made.step(sequences, cuts), expected, tolerance=1e-9)
        except AssertionError as error:
            yield error
        made.engine.close()


def test_steps_that_recompute_have_no_faults():
    assert [*faults_of_recomputing_steps()] == []


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_found(defect):
    with DEFECTS[defect]():
        assert any(faults_of_recomputing_steps())


def test_factors_are_multiplied_on_a_cpu_without_half_precision(monkeypatch):
    """As accurately as whole weights are: within a few roundings of bf16."""
    monkeypatch.setattr(half_products, "cpu_multiplies", lambda dtype: dtype.itemsize > 2)
    model = tiny_model("gqa, q/k-norm")
    trainable = trainable_of(AdapterConfig(rank=3, alpha=2), None, model=model)
    weights = random_weights(model, dtype=torch.bfloat16, trainable=trainable)
    sequences = sequences_of(model)
    exact = {name: weight.double() for name, weight in weights.items()}
    expected = autograd_step(model, exact, sequences, trainable=trainable)
    trained = Trained(model, weights, trainable=trainable)
    step = trained.step(sequences, [(0, 5, 23), (0, 17)])
    assert all(gradient.dtype is torch.float32 for gradient in step[1].values())
    assert_same_step(step, expected, tolerance=0.1)
