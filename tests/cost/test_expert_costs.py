"""Seconds and bytes of steps of models with experts, by hand."""

import numpy as np
import pytest

from sppo.config import PRESETS as MODELS
from sppo.config.model import ModelConfig
from sppo.cost.candidate import Candidate
from sppo.cost.expert_products import expert_kernels
from sppo.cost.layer import Workload, layer_parts
from sppo.cost.layer_kinds import kinds_of_model
from sppo.cost.packed_sequence import parts_of_sequence
from sppo.cost.parameters import num_parameters
from sppo.cost.stages.seconds import weight_operand_bytes
from sppo.cost.stages.stage_cost import costs_without_activations
from sppo.cost.trainable import EVERYTHING
from sppo.hardware.presets import PRESETS

MODEL = ModelConfig.model_validate({**MODELS["qwen3-30b-a3b"], "num_layers": 2})
H100 = PRESETS["h100"]
EXPERT_WEIGHTS = 128 * 3 * 2048 * 768
PER_TOKEN = 8


def passes(*lengths):
    (kind,) = kinds_of_model(MODEL, EVERYTHING)
    return layer_parts(Workload(MODEL, H100), parts_of_sequence(lengths), kind=kind)


def test_few_rows_of_each_expert_take_as_long_as_their_weights_are_read():
    """With 128 tokens each expert has 8 rows."""
    read_s = 2 * EXPERT_WEIGHTS / H100.device.memory_bytes_per_s
    few = passes(128)["forward"]["products"][0]
    assert read_s < few < 1.1 * read_s
    assert passes(64)["forward"]["products"][0] > read_s


def test_many_rows_of_each_expert_take_as_long_as_their_flops():
    """In tiles of 1024 rows of each expert, of which half a product's 128 rows are empty."""
    tokens, filled = 1 << 20, 1024 / (1024 + 64)
    of_experts = PER_TOKEN * 3 * 2048 * 768 / filled
    flops = 2 * tokens * (of_experts + 2048 * (2 * 4096 + 2 * 512 + 128))
    peak = H100.device.bf16_flops_per_s * H100.device.gemm_efficiency
    assert passes(tokens)["forward"]["products"][0] == pytest.approx(flops / peak, rel=0.02)


def test_experts_fill_a_gpu_together_but_not_their_last_tiles():
    """With 4Ki tokens each expert has 256 rows: two full tiles and a half empty one on average."""
    flops = 2 * 4096 * PER_TOKEN * 3 * 2048 * 768
    peak = H100.device.bf16_flops_per_s * H100.device.gemm_efficiency
    experts_s = passes(4096)["backward"]["products"][0] - dense_products(4096)
    assert experts_s == pytest.approx(1.25 * flops / peak, rel=0.06)


def dense_products(tokens):
    """Return the seconds of the same layer's products outside of experts."""
    model = MODEL.model_copy(update={"experts": None})
    (kind,) = kinds_of_model(MODEL, EVERYTHING)
    outside = tuple(own for own in kind.shapes if not own[0].startswith("expert_"))
    workload = Workload(model, H100)
    found = layer_parts(workload, parts_of_sequence((tokens,)), kind=kind._replace(shapes=outside))
    return found["backward"]["products"][0]


def test_a_cpu_multiplies_experts_one_after_another():
    (kind,) = kinds_of_model(MODEL, EVERYTHING)
    launches = [
        expert_kernels(PRESETS[name].device, kind, dtype=dtype)
        for name, dtype in (("h100", "bf16"), ("h100", "fp32"), ("laptop-cpu", "bf16"))
    ]
    forward, backward = launches[0]
    assert launches[1:] == [(forward + 127 * 3, backward + 127 * 6)] * 2


def test_gradients_of_all_experts_are_summed_for_every_subsequence():
    sums = passes(1024, 2048)["weight"]["gradient_sums"]
    weights = EXPERT_WEIGHTS + 2048 * (2 * 4096 + 2 * 512 + 128)
    assert sums == pytest.approx(np.full(2, 8 * weights / H100.device.memory_bytes_per_s))


def test_tiles_of_many_tokens_add_their_gradients_one_by_one():
    """A tile has 1024 rows of each of 128 experts, of which a token has 8: 16Ki tokens."""
    one, four = (passes(16384 * n)["weight"]["gradient_sums"][0] for n in (1, 4))
    assert four - one == pytest.approx(3 * 8 * EXPERT_WEIGHTS / H100.device.memory_bytes_per_s)


def test_deferred_products_keep_a_row_for_each_expert_of_a_token():
    """Gradients of gate and up and of the output, and the inputs of both kinds of products."""
    candidate = Candidate(Workload(MODEL, H100), (1024,), schedule="zb_h1")
    of_experts = PER_TOKEN * (2 * 768 + 2048 + 2048 + 768)
    attention = (4096 + 2 * 512 + 2048) + (2048 + 4096)  # q, k, v, o, and their inputs
    of_layer = of_experts + attention + 128 + 2048  # the router's, and its input
    assert weight_operand_bytes(candidate) == 2 * of_layer * 2 * 1024


def test_lent_layers_take_all_of_their_experts_along():
    costs = costs_without_activations(Candidate(Workload(MODEL, H100), (1024,)))
    in_layers = num_parameters(MODEL) - 2 * 151936 * 2048 - 2048
    assert costs.weight_bytes == 2 * in_layers
    assert costs.weight_gradient_bytes == 4 * in_layers
