"""What a Python program gives to the engine: computed, or refused by value, rule and fix."""

import math

import pytest
import torch

import sppo
from sppo.config import PRESETS, ModelConfig
from sppo.cost.trainable import Adapter, Trainable

MODEL = ModelConfig.model_validate(PRESETS["tiny-test"])
TOKENS = torch.arange(65) % MODEL.vocab_size
CUTS = [0, 20, 64]
ADAPTED = Trainable(Adapter(rank=2, scale=1.0), only=())


def sequence(**changed):
    """A sequence of 64 tokens with some fields changed."""
    fields = {"tokens_S": TOKENS[:-1], "labels_S": TOKENS[1:], "document_starts": (0,)}
    return sppo.SequenceData(**{**fields, **changed})


def labels(value):
    """The labels with one changed."""
    changed = TOKENS[1:].clone()
    changed[7] = value
    return changed


@pytest.fixture(scope="module")
def weights():
    return sppo.initial_weights(MODEL, seed=0)


@pytest.fixture
def engine(weights):
    return sppo.Engine(MODEL, weights=weights, gradients=sppo.zero_gradients(weights))


def with_one(tensors, value):
    """The tensors with the first replaced; `value` makes the new one of the old."""
    name = next(iter(tensors))
    return {**tensors, name: value(tensors[name])}


def all_in_one(weights):
    """Gradients of all parameters at the begin of the same memory."""
    memory = torch.zeros(max(weight.numel() for weight in weights.values()))
    return {name: memory[: weight.numel()].view_as(weight) for name, weight in weights.items()}


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"model": {}}, TypeError, r"model=\{\}\): give it run.model"),
        ({"weights": None}, TypeError, r"weights=None\): tensors by name; sppo.initial_weights"),
        ({"weights": {}}, ValueError, r"weights lack embed.weight and \d+ more; sppo.initial"),
        ({"weights": lambda w: with_one(w, len)}, TypeError, "weights.* is 257, not a tensor"),
        ({"weights": lambda w: with_one(w, torch.t)}, ValueError, r"shape \[32, 257\], .* needs"),
        ({"weights": lambda w: with_one(w, torch.Tensor.half)}, ValueError, "float32.*float16"),
        ({"weights": lambda w: {n: t.int() for n, t in w.items()}}, ValueError, "floating-point"),
        ({"gradients": []}, TypeError, r"gradients=\[\]\): tensors by name; sppo.zero_gradients"),
        ({"gradients": {}}, ValueError, "gradients lack embed.weight and .*; sppo.zero_gradients"),
        ({"weights": torch.zeros(3)}, TypeError, r"weights=tensor\(.*: tensors by name"),
        (
            {"trainable": ADAPTED},
            ValueError,
            r"weights lack layers.0.q.lora_a and \d+ more; .*seed=0, trainable=trainable\) gives",
        ),
        (
            {"trainable": Trainable(only=("head.*",))},
            ValueError,
            r"gradients\['embed.weight'\] is of a parameter that does not train; sppo.zero_gra",
        ),
        ({"gradients": lambda w: w}, ValueError, "gradients.* is the memory of weights"),
        ({"gradients": all_in_one}, ValueError, "gradients.* is the memory of gradients"),
        (
            {"gradients": lambda w: with_one(sppo.zero_gradients(w), torch.Tensor.bfloat16)},
            ValueError,
            "is torch.bfloat16 on cpu, needs torch.float32 on cpu",
        ),
    ],
)
def test_an_engine_refuses_what_is_no_model(changed, error, says, weights):
    given = {"model": MODEL, "weights": weights, "gradients": sppo.zero_gradients(weights)}
    for name, value in changed.items():
        given[name] = value(weights) if callable(value) else value
    with pytest.raises(error, match=says):
        sppo.Engine(**given)


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"sequences": None}, TypeError, "sequences=None: give a list of sppo.SequenceData"),
        ({"sequences": [TOKENS]}, TypeError, r"sequences\[0\]=tensor.*: give a sppo.SequenceData"),
        (sequence(tokens_S=[1, 2]), TypeError, r"tokens_S=\[1, 2\]: give a tensor"),
        (sequence(labels_S=TOKENS[None]), TypeError, r"labels_S=\[1, 65\] of torch.int64: give"),
        (sequence(labels_S=TOKENS[1:].half()), TypeError, "torch.float16: give"),
        (sequence(labels_S=TOKENS), ValueError, "64 tokens and 65 labels; give one label for each"),
        (sequence(labels_S=TOKENS[2:]), ValueError, "64 tokens and 63 labels"),
        (sequence(labels_S=labels(-1)), ValueError, r"labels_S\[7\] is -1; .* or -100 for no"),
        (sequence(labels_S=labels(MODEL.vocab_size)), ValueError, r"labels_S\[7\] is .*; ids go"),
        (sequence(tokens_S=labels(-100)), ValueError, r"tokens_S\[7\] is -100; ids go from 0 to"),
        (sequence(tokens_S=TOKENS[:-1].to("meta")), ValueError, "on meta, the weights on cpu"),
        (sequence(document_starts=(0, 30, 10)), ValueError, "give ascending positions"),
        (sequence(document_starts=None), ValueError, "document_starts=None: give"),
        ({"boundaries": None}, ValueError, r"boundaries=None: .* 1 sequences, .* \[\[0, 64\]\]"),
        ({"boundaries": CUTS}, ValueError, r"boundaries=\[0, 20, 64\]: give one list of cuts"),
        ({"boundaries": [7]}, ValueError, r"boundaries\[0\]=7: these do not tile"),
        ({"boundaries": [[0, 20, 63]]}, ValueError, "do not tile a sequence of 64 tokens"),
        ({"boundaries": [[0, 40, 20, 64]]}, ValueError, "give ascending whole numbers"),
        ({"boundaries": [[0, 20.0, 64]]}, ValueError, "give ascending whole numbers"),
        ({"num_valid": -1}, ValueError, "num_valid=-1: give a whole number"),
        ({"num_valid": math.nan}, ValueError, "num_valid=nan: give a whole number"),
        ({"num_valid": 0}, ValueError, "num_valid=0, but labels of these sequences count"),
    ],
)
def test_a_step_refuses_bad_values_before_it_computes(changed, error, says, engine, weights):
    given = {"sequences": [sequence()], "boundaries": [CUTS]}
    given |= changed if isinstance(changed, dict) else {"sequences": [changed]}
    before = {name: weight.clone() for name, weight in weights.items()}
    with pytest.raises(error, match=says):
        engine.accumulate(**given)
    if isinstance(changed, sppo.SequenceData):
        with pytest.raises(error, match=says):
            engine.evaluate(changed, CUTS)
    assert all(torch.equal(weights[name], before[name]) for name in weights)
    assert float(engine.accumulate([sequence()], [CUTS]).total_loss) > 0


def test_labels_that_do_not_count_are_no_values_out_of_range(engine):
    nothing = sequence(labels_S=torch.full((64,), -100))
    result = engine.accumulate([nothing, sequence()], [CUTS, [0, 64]])
    assert result.num_valid == 64
    assert float(engine.accumulate([nothing], [CUTS], num_valid=0).total_loss) == 0


def test_an_adapted_engine_starts_as_the_model_and_gives_what_trains_gradients(engine):
    weights = sppo.initial_weights(MODEL, seed=0, trainable=ADAPTED)
    gradients = sppo.zero_gradients(weights, trainable=ADAPTED)
    adapted = sppo.Engine(MODEL, weights=weights, gradients=gradients, trainable=ADAPTED)
    loss = adapted.accumulate([sequence()], [CUTS]).total_loss
    assert loss == engine.accumulate([sequence()], [CUTS]).total_loss
    assert {name for name, gradient in gradients.items() if gradient.any()} == {
        name for name in weights if name.endswith(".lora_b")
    }
