"""Predicted working set of layers with adapters, or frozen, against torch's CPU allocator."""

from itertools import accumulate

import pytest
import torch

from sppo.cost.layer_kinds import layer_kinds
from sppo.cost.live_sets import working_set as planned
from sppo.cost.trainable import Adapter, Trainable
from sppo.cost.workload import Workload
from sppo.engine.engine import Engine
from sppo.engine.unit import SequenceData
from sppo.model.gradients import zero_gradients
from sppo.model.initialize import initial_weights
from sppo.training.state import DTYPES
from tests.cost.live_sets.test_working_set import (
    LAYERS,
    RECOMPUTED,
    THREADS_BYTES,
    live,
    machine,
    model_of,
)
from tests.cost.pool import peak_of_step
from tests.tiers import each_once

TRAINED = {
    "rank 16": Trainable(Adapter(rank=16, scale=1.0), ()),
    "rank 256": Trainable(Adapter(rank=256, scale=1.0), ()),
    "rank 256 of the output": Trainable(Adapter(rank=256, scale=1.0, targets=("down",)), ()),
    "frozen": Trainable(only=("layers.0.*norm*",)),
}


def measured(model, trainable, *, dtype, policy, lengths):
    """Peak of a step beyond what outlives it."""
    weights = {n: w.to(DTYPES[dtype]) for n, w in initial_weights(model, seed=0).items()}
    for name, shape in trainable.factor_shapes(model, range(model.num_layers)).items():
        weights[name] = torch.full(shape, 0.01, dtype=DTYPES[dtype])
    engine = Engine(
        model,
        weights=weights,
        gradients=zero_gradients(weights, trainable=trainable),
        policy=policy,
        trainable=trainable,
    )
    tokens = torch.arange(sum(lengths) + 1) % model.vocab_size
    cuts = [*accumulate(lengths, initial=0)]
    return peak_of_step(engine, SequenceData(tokens[:-1], tokens[1:]), cuts)


def predicted(model, trainable, *, dtype, policy, lengths):
    workload = Workload(model, machine(), dtype=dtype, trainable=trainable)
    kind = layer_kinds(model, trainable)[-1]
    moments = [
        moment
        for tokens, prefix in zip(lengths, accumulate(lengths[:-1], initial=0), strict=True)
        for moment in planned.working_sets(
            workload,
            tokens=tokens,
            prefix=prefix,
            recomputed=RECOMPUTED[policy],
            layers=LAYERS,
            kind=kind,
        )
    ]
    return max(*moments, planned.loss_working_set(workload, tokens=max(lengths)), key=live)


@pytest.mark.parametrize(
    ("trained", "shape", "policy", "dtype"),
    each_once(
        TRAINED,
        ["llama", "gpt", "qwen3"],
        ["retain", "keep_attention", "recompute"],
        ["bf16", "fp32"],
    ),
)
def test_it_is_what_the_allocator_hands_out(trained, shape, policy, dtype):
    model, trainable = model_of(shape), TRAINED[trained]
    case = {"dtype": dtype, "policy": policy, "lengths": (800, 1024)}
    seen = measured(model, trainable, **case)
    moment = predicted(model, trainable, **case)
    assert seen == pytest.approx(live(moment), rel=0.03, abs=THREADS_BYTES), moment
