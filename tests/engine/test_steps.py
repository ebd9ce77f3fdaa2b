"""One engine over many steps: evaluation, failures and peaks leave nothing behind."""

import itertools

import pytest
import torch

from sppo.activations.policy import POLICIES
from sppo.activations.tensor_classes import tensor_bytes_per_token
from sppo.engine.engine import Engine
from sppo.engine.pipeline import Pipeline
from sppo.model.gradients import zero_gradients
from tests.engine.models import (
    VARIANTS,
    Trained,
    assert_equal_bits,
    engine_step,
    random_sequence,
    random_weights,
    tiny_model,
)
from tests.planning.one_device import predicted
from tests.tiers import each_once

CUTS = (0, 4, 5, 17)


def two_sequences(model, *, seed=0):
    return [random_sequence(model, 17, seed=seed), random_sequence(model, 9, seed=seed + 1)]


TWO_CUTS = [CUTS, (0, 6, 9)]


@pytest.fixture
def trained():
    model = tiny_model("gqa, q/k-norm")
    made = Trained(model, random_weights(model), policy="keep_attention")
    made.model = model
    return made


def assert_idle(engine):
    engine._stages[0].assert_idle()
    peaks = (engine.take_peaks(), engine.take_peaks())[1]
    assert (peaks.activations_bytes, peaks.kv_bytes) == (0, 0)


def test_evaluation_gives_the_loss_of_each_token():
    model = tiny_model("gpt")
    weights = random_weights(model)
    data = random_sequence(model, 17, starts=(0, 7))
    loss, _ = engine_step(model, weights, [data], [CUTS])
    evaluator = Engine(model, weights=weights, gradients=None)
    losses_S = evaluator.evaluate(data, CUTS)
    assert losses_S.shape == (17,)
    assert torch.all((losses_S == 0) == (data.labels_S == -100))
    assert float(losses_S.sum() / data.num_valid) == pytest.approx(float(loss), rel=1e-14)
    assert_idle(evaluator)


def test_tensors_that_are_replaced_between_steps_are_the_ones_used():
    model, data = tiny_model(), random_sequence(tiny_model(), 17)
    weights = random_weights(model)
    gradients = zero_gradients(weights)
    engine = Engine(model, weights=weights, gradients=gradients)
    first = engine.accumulate([data], [CUTS]).total_loss
    once = {name: gradient.clone() for name, gradient in gradients.items()}
    gradients.update(zero_gradients(weights))
    assert engine.accumulate([data], [CUTS]).total_loss == first
    assert all(torch.equal(once[name], gradient) for name, gradient in gradients.items())
    weights.update({name: torch.zeros_like(weight) for name, weight in weights.items()})
    assert engine.accumulate([data], [CUTS]).total_loss != first


def test_an_engine_without_gradients_refuses_to_train():
    model = tiny_model()
    engine = Engine(model, weights=random_weights(model), gradients=None)
    with pytest.raises(ValueError, match="this engine only evaluates"):
        engine.accumulate([random_sequence(model, 17)], [CUTS])
    assert_idle(engine)


def test_evaluation_and_training_do_not_touch_each_other(trained):
    data = two_sequences(trained.model)
    first = trained.engine.evaluate(data[0], CUTS)
    step = trained.step(data, TWO_CUTS)
    before = {name: g.clone() for name, g in trained.gradients.items()}
    again = trained.engine.evaluate(data[0], CUTS)
    assert torch.equal(first, again)
    assert all(torch.equal(before[name], g) for name, g in trained.gradients.items())
    assert_idle(trained.engine)
    assert_equal_bits(trained.step(data, TWO_CUTS), step)


def test_steps_in_a_row_are_each_their_own(trained):
    for seed in (0, 3, 0, 7):
        data = two_sequences(trained.model, seed=seed)
        fresh = engine_step(
            trained.model, random_weights(trained.model), data, TWO_CUTS, policy="retain"
        )
        assert_equal_bits(trained.step(data, TWO_CUTS), fresh)
        assert_idle(trained.engine)


class GiveUp(BaseException):
    """Like a signal: not an Exception."""


def raising_at(position, error):
    count = iter(range(1000))

    def before_action(_position, _action):
        if next(count) == position:
            raise error

    return before_action


PROGRAM = (
    *("0F0.0", "0F0.1", "0F0.2", "0B0.2", "0B0.1", "0B0.0"),
    *("0F1.0", "0F1.1", "0B1.1", "0B1.0", "0REDUCE"),
)


@pytest.mark.parametrize("error", [RuntimeError("disk on fire"), GiveUp()])
def test_a_step_given_up_anywhere_is_named_and_closes_the_engine(error):
    model = tiny_model("gqa, q/k-norm")
    weights, data = random_weights(model), two_sequences(model)
    for position, action in enumerate(PROGRAM):
        trained = Trained(model, weights)
        failure = type(error)(*error.args)
        with pytest.raises(type(error)) as caught:
            trained.step(data, TWO_CUTS, before_action=raising_at(position, failure))
        (note,) = caught.value.__notes__
        assert f"failed in action {position + 1} of {len(PROGRAM)}: " in note  # counted from 1
        assert f">>> {action} <<<" in note
        shown = [word for word in note.split(": ")[1].split() if word not in (">>>", "<<<")]
        assert tuple(shown) == PROGRAM[max(0, position - 3) : position + 4]
        with pytest.raises(RuntimeError, match="closed, as after an error in a step"):
            trained.step(data, TWO_CUTS)
        with pytest.raises(RuntimeError, match="closed, as after an error in a step"):
            trained.engine.evaluate(data[0], CUTS)


def test_a_failure_inside_a_kernel_is_named(trained):
    data = two_sequences(trained.model)
    data[1].tokens_S[7] = trained.model.vocab_size  # beyond the embedding
    trained.engine._checks_steps = False  # as in training, whose data are checked when read
    with pytest.raises(IndexError) as caught:
        trained.step(data, TWO_CUTS)
    assert ">>> 0F1.1 <<<" in caught.value.__notes__[0]


def test_what_is_left_over_is_noticed(trained):
    from sppo.activations.activation_layout import ActivationKey

    store = trained.engine._stages[0].store
    store.retained.reserve(64)
    store.put(ActivationKey(0, 0, 0), retained={"x_in": torch.zeros(1)})
    with pytest.raises(AssertionError, match="left over after the step: {'activations': 1"):
        trained.engine._stages[0].assert_idle()
    data = two_sequences(trained.model)[1:]
    with pytest.raises(AssertionError, match="a stack in use"):
        trained.step(data, TWO_CUTS[1:])


@pytest.mark.parametrize(
    ("variant_and_policy", "dtype"),
    each_once(itertools.product(VARIANTS, POLICIES), ["fp32", "bf16"]),
    ids=str,
)
def test_peaks_are_those_predicted(variant_and_policy, dtype):
    variant, policy = variant_and_policy
    model = tiny_model(variant)
    weights = random_weights(model, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    made = Trained(model, weights, policy=policy)
    buckets = predicted(model, dtype=dtype, policy=policy, lengths=(4, 1, 12))
    for seed in range(2):
        made.step(two_sequences(model, seed=seed), TWO_CUTS)  # the longer one decides
        peaks = made.engine.take_peaks()
        saved = buckets.activations_bytes + buckets.loss_gradient_bytes
        assert peaks.activations_bytes == saved
        assert peaks.kv_bytes == buckets.kv_bytes + buckets.kv_gradients_bytes
    made.engine.evaluate(random_sequence(model, 17), CUTS)
    assert made.engine.take_peaks().activations_bytes == 0


def test_only_the_inputs_of_some_layers_are_kept():
    model = tiny_model(num_layers=5)
    weights = random_weights(model)
    sizes = tensor_bytes_per_token(model, model.layer_type(0), element_bytes=8)
    retained = {}
    for every in (1, 2, 5):
        made = Trained(
            model, weights, policy="keep_attention", pipeline=Pipeline(input_every=every)
        )
        made.step([random_sequence(model, 17)], [CUTS])
        retained[every] = made.engine.take_peaks().activations_bytes
    assert retained[1] - retained[2] == 2 * 17 * sizes["x_in"]
    assert retained[1] - retained[5] == 4 * 17 * sizes["x_in"]
