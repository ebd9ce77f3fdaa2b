"""Blocks of torch's CPU flash kernels: correct in odd shapes, no memory growth over many calls."""

import random

import pytest
import torch

from sppo.config.model import ModelConfig
from sppo.engine.engine import Engine
from sppo.engine.unit import SequenceData
from sppo.kernels.native.process_memory import resident_bytes
from sppo.model.gradients import zero_gradients
from sppo.model.initialize import initial_weights
from sppo.units import MIB

LENGTH = 1024


def step(engine, seed):
    """One step over documents whose lengths nobody has seen."""
    starts = sorted({0, *random.Random(seed).sample(range(1, LENGTH), 7)})
    tokens = torch.arange(LENGTH + 1) % 256
    data = SequenceData(tokens[:-1], tokens[1:], document_starts=tuple(starts))
    engine.accumulate([data], [(0, LENGTH // 2, LENGTH)])


@pytest.mark.exhaustive
def test_many_document_lengths_do_not_grow_the_process():
    """oneDNN compiles for every shape of a product and frees nothing."""
    model = ModelConfig(
        vocab_size=256, hidden_size=256, num_layers=1, num_heads=4, num_kv_heads=2, mlp_size=256
    )
    weights = {n: w.to(torch.bfloat16) for n, w in initial_weights(model, seed=0).items()}
    engine = Engine(
        model, weights=weights, gradients=zero_gradients(weights), policy="keep_attention"
    )
    for seed in range(5):
        step(engine, seed)
    before = resident_bytes()
    for seed in range(5, 25):
        step(engine, seed)
    assert resident_bytes() - before < 24 * MIB
