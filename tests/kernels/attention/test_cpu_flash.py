"""Blocks of torch's CPU flash kernels: correct in odd shapes, no memory growth over many calls."""

import random

import pytest
import torch

from sppo.config.model import ModelConfig
from sppo.engine.engine import Engine
from sppo.engine.unit import SequenceData
from sppo.kernels.attention import cpu_flash
from sppo.kernels.attention.call import AttentionCall
from sppo.kernels.attention.choice import KERNELS
from sppo.kernels.attention.cpu_flash import HALF_BACKWARD_TOKENS
from sppo.kernels.native.process_memory import resident_bytes
from sppo.model.gradients import zero_gradients
from sppo.model.initialize import initial_weights
from sppo.units import MIB
from tests.kernels.attention.reference import computed, exactly

LENGTH = 1024


@pytest.mark.parametrize("multiplies", [True, False])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("group", [1, 4])
def test_gradients_of_odd_shapes_in_bf16(monkeypatch, window, group, multiplies):
    monkeypatch.setattr(cpu_flash, "cpu_multiplies", lambda _dtype: multiplies)
    torch.manual_seed(0)
    queries, keys = 2 * HALF_BACKWARD_TOKENS + 37, 5 * HALF_BACKWARD_TOKENS + 11
    q, do = (torch.randn(queries, 2 * group, 64, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(keys, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    call = AttentionCall(q, k, v, window=window, document_starts=(0, 130, 700, keys - 400))
    found = computed(KERNELS["cpu_flash"], call, do)
    for name, exact in computed(KERNELS["torch_blocks"], exactly(call), do.double()).items():
        assert (found[name].double() - exact).norm() / exact.norm() < 1e-2


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
