"""Loss and gradients of the engine against ordinary training in float64: any model, any cuts.

Tolerance: 1e-10 of each tensor's largest value. float64 has 1e-16, and sums run over at most a
hundred tokens.
"""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.activations.policy import POLICIES
from sppo.engine.unit import SequenceData
from sppo.kernels.cross_entropy import LossTerms
from sppo.kernels.labels import IGNORED_LABEL
from tests.engine.models import (
    VARIANTS,
    Trained,
    assert_equal_bits,
    assert_same_step,
    autograd_step,
    engine_step,
    random_sequence,
    random_weights,
    tiny_model,
)
from tests.engine.reference import reference_token_losses
from tests.tiers import examples

TOLERANCE = 1e-10
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@st.composite
def sequences_and_cuts(draw, model):
    """One to three sequences of different lengths, each cut at random."""
    sequences, cuts = [], []
    for seed in range(draw(st.integers(1, 3))):
        length = draw(st.integers(1, 40))
        inner = st.sets(st.integers(1, 39), max_size=8).map(
            lambda found, length=length: sorted(x for x in found if x < length)
        )
        starts = (0, *draw(inner)[:4])
        sequences.append(random_sequence(model, length, seed=seed, starts=starts))
        cuts.append((0, *draw(inner), length))
    return sequences, cuts


@pytest.mark.parametrize("variant", VARIANTS)
@settings(deadline=None, max_examples=examples(5, all=12))
@given(data=st.data())
def test_any_cut_gives_the_gradients_of_autograd(variant, data):
    model = tiny_model(variant)
    sequences, cuts = data.draw(sequences_and_cuts(model))
    policy = data.draw(st.sampled_from(POLICIES))
    weights = random_weights(model, seed=data.draw(st.integers(0, 99)))
    actual = engine_step(model, weights, sequences, cuts, policy=policy)
    assert_same_step(actual, autograd_step(model, weights, sequences), tolerance=TOLERANCE)


@settings(deadline=None, max_examples=examples(20, all=60))
@given(data=st.data())
def test_any_shape_gives_the_gradients_of_autograd(data):
    kv_heads, head_size = data.draw(st.integers(1, 3)), 2 * data.draw(st.integers(1, 5))
    model = tiny_model(
        data.draw(st.sampled_from(sorted(VARIANTS))),
        num_kv_heads=kv_heads,
        num_heads=kv_heads * data.draw(st.integers(1, 4)),
        head_size=head_size,
        hidden_size=data.draw(st.integers(2, 17)),
        mlp_size=data.draw(st.integers(1, 19)),
        vocab_size=data.draw(st.integers(2, 40)),
        num_layers=data.draw(st.integers(1, 3)),
        sliding_window=data.draw(st.none() | st.integers(1, 12)),
        sliding_window_first_layer=data.draw(st.integers(0, 1)),
        norm_eps=data.draw(st.sampled_from((1e-2, 1e-5))),
    )
    sequences, cuts = data.draw(sequences_and_cuts(model))
    weights = random_weights(model)
    actual = engine_step(
        model, weights, sequences, cuts, policy=data.draw(st.sampled_from(POLICIES))
    )
    assert_same_step(actual, autograd_step(model, weights, sequences), tolerance=TOLERANCE)


@pytest.mark.parametrize("variant", ["mha", "tied, yarn, all biases"])
def test_smoothed_labels_and_z_loss(variant):
    """In training; an evaluation by the same engine adds neither."""
    model, terms = tiny_model(variant), LossTerms(label_smoothing=0.2, z_loss=0.01)
    weights, data = random_weights(model), random_sequence(model, 29, starts=(0, 11))
    trained = Trained(model, weights, loss_terms=terms)
    actual = trained.step([data], [(0, 7, 20, 29)])
    expected = autograd_step(model, weights, [data], terms=terms)
    assert_same_step(actual, expected, tolerance=TOLERANCE)
    losses = trained.engine.evaluate(data, (0, 7, 20, 29))
    plain = reference_token_losses(model, weights, data)
    torch.testing.assert_close(losses, plain, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_token_at_a_time(policy):
    model = tiny_model("gqa, q/k-norm")
    weights, data = random_weights(model), random_sequence(model, 29, starts=(0, 11, 12))
    actual = engine_step(model, weights, [data], [range(30)], policy=policy)
    assert_same_step(actual, autograd_step(model, weights, [data]), tolerance=TOLERANCE)


@pytest.mark.parametrize("policy", ["retain", "recompute"])
def test_spans_that_cross_every_attention_limit(policy):
    """1300 tokens: a diagonal above 1024 is halved, a band has three tiles of 512."""
    model = tiny_model("window from layer 1, llama3", sliding_window=150, num_layers=2)
    weights, data = random_weights(model), random_sequence(model, 1300)
    actual = engine_step(model, weights, [data], [(0, 1100, 1101, 1300)], policy=policy)
    assert_same_step(actual, autograd_step(model, weights, [data]), tolerance=TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_policies_agree_bit_for_bit(variant, dtype):
    """What is recomputed comes from the same rows by the same operations."""
    model = tiny_model(variant)
    weights = random_weights(model, dtype=dtype)
    sequences = [random_sequence(model, 37), random_sequence(model, 20, seed=1, starts=(0, 8))]
    cuts = [(0, 1, 9, 30, 37), (0, 13, 20)]
    retained = engine_step(model, weights, sequences, cuts, policy="retain")
    for policy in POLICIES[1:]:
        other = engine_step(model, weights, sequences, cuts, policy=policy)
        assert_equal_bits(other, retained)


def packed(documents):
    """Documents side by side in one sequence that keeps them apart."""
    lengths = [len(d.tokens_S) for d in documents]
    return SequenceData(
        torch.cat([d.tokens_S for d in documents]),
        torch.cat([d.labels_S for d in documents]),
        (0, *list(accumulate(lengths))[:-1]),
    )


@pytest.mark.parametrize("variant", ["gqa, q/k-norm", "mqa, window, biases", "gpt"])
def test_isolated_documents_are_the_documents_apart(variant):
    model = tiny_model(variant)
    weights = random_weights(model)
    documents = [random_sequence(model, n, seed=n) for n in (1, 14, 3, 9, 16)]
    apart = engine_step(model, weights, documents, [(0, len(d.tokens_S)) for d in documents])
    together = engine_step(model, weights, [packed(documents)], [(0, 7, 15, 16, 30, 43)])
    assert_same_step(together, apart, tolerance=TOLERANCE)


def test_documents_that_are_not_isolated_see_each_other():
    """The test above could not fail if isolation did nothing."""
    model = tiny_model()
    weights = random_weights(model)
    data = packed([random_sequence(model, n, seed=n) for n in (14, 16)])
    isolated, _ = engine_step(model, weights, [data], [(0, 30)])
    open_data = SequenceData(data.tokens_S, data.labels_S)
    crossing, _ = engine_step(model, weights, [open_data], [(0, 30)])
    assert abs(float(isolated - crossing)) > 1e-3


def test_a_step_is_the_mean_over_all_valid_labels():
    """Sequences weigh by their valid labels, not each the same."""
    model = tiny_model()
    weights = random_weights(model)
    sequences = [random_sequence(model, n, seed=n, ignored=0.5) for n in (5, 31)]
    loss, gradients = engine_step(model, weights, sequences, [(0, 5), (0, 10, 31)])
    parts = [engine_step(model, weights, [s], [(0, len(s.tokens_S))]) for s in sequences]
    counts = [s.num_valid for s in sequences]
    assert counts[0] != counts[1]
    mean = [
        sum(n * value for n, value in zip(counts, values, strict=True)) / sum(counts)
        for values in zip(*((l, *g.values()) for l, g in parts), strict=True)
    ]
    assert_same_step(
        (loss, gradients), (mean[0], dict(zip(gradients, mean[1:], strict=True))), tolerance=1e-12
    )


def test_gradients_add_up_over_calls():
    model = tiny_model("gqa, q/k-norm")
    trained = Trained(model, random_weights(model))
    data, cuts = [random_sequence(model, 20)], [(0, 7, 20)]
    _, once = trained.step(data, cuts)
    trained.engine.accumulate(data, cuts)
    for name, gradient in trained.gradients.items():
        torch.testing.assert_close(gradient, 2 * once[name], rtol=1e-12, atol=1e-15)


def without_labels(length: int) -> SequenceData:
    return SequenceData(
        torch.zeros(length, dtype=torch.int64), torch.full((length,), IGNORED_LABEL)
    )


def test_a_step_without_labels_adds_nothing():
    model = tiny_model()
    loss, gradients = engine_step(model, random_weights(model), [without_labels(4)], [(0, 2, 4)])
    assert loss.isnan()  # the mean of nothing
    assert not any(gradient.any() for gradient in gradients.values())


def test_a_sequence_without_labels_beside_others_changes_nothing():
    model = tiny_model("gqa, q/k-norm")
    weights, data = random_weights(model), random_sequence(model, 12)
    loss, gradients = engine_step(model, weights, [data], [(0, 5, 12)])
    cuts = [(0, 2, 4), (0, 5, 12)]
    beside, those_beside = engine_step(model, weights, [without_labels(4), data], cuts)
    assert beside == pytest.approx(loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(those_beside[name], gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("cuts", [(0, 3), (1, 4), (0, 5)])
def test_cuts_that_do_not_tile_are_refused(cuts):
    model = tiny_model()
    with pytest.raises(ValueError, match="do not tile a sequence of 4 tokens"):
        engine_step(model, random_weights(model), [random_sequence(model, 4)], [cuts])
