"""FLOPs formulas against counts of single pairs, and of executed matrix products."""

from math import prod

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from sppo.activations.placement import ActivationPlacement
from sppo.activations.policy import POLICIES
from sppo.activations.tensor_classes import ATTENTION, LINEAR
from sppo.config import PRESETS as MODELS
from sppo.config.model import LinearAttention, ModelConfig
from sppo.cost.candidate import Candidate
from sppo.cost.flops import (
    causal_pairs,
    head_flops,
    ignored_flops,
    layer_flops,
    model_flops,
    pair_flops,
    partition_costs,
    recomputed_linear_flops,
    step_flops,
)
from sppo.cost.layer_kinds import kinds_of_model
from sppo.cost.linear_attention.delta_rule import repeated_rule_flops, rule_flops
from sppo.cost.stages.executed_flops import executed_flops, flops_of_parts
from sppo.cost.tiles import CHUNK_TOKENS
from sppo.cost.trainable import EVERYTHING, Adapter, Trainable, layers_without_backward
from sppo.cost.workload import Workload
from sppo.hardware.presets import PRESETS
from sppo.kernels import chunked_rule
from tests.engine.models import (
    HYBRID,
    VARIANTS,
    Trained,
    random_sequence,
    random_weights,
    tiny_model,
)
from tests.kernels.attention.reference import visible_pairs
from tests.tiers import each_once


@pytest.mark.parametrize("window", [None, 1, 4, 13, 99])
@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 37), (5, 6), (11, 30), (3, 3)])
def test_pairs_are_those_that_are_visible(start, end, window):
    visible = visible_pairs(end - start, max(end, 1), window=window, document_starts=(0,))
    assert causal_pairs(start, end, window=window) == (int(visible.sum()) if end > start else 0)


class ProductFlops(TorchDispatchMode):
    """2 m n k of every matrix product; attention kernels hold theirs inside and are not seen."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::").rstrip("_")
        if name in ("mm", "addmm"):
            a, b = args[-2:]
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return function(*args, **(kwargs or {}))


def attention_flops(model, length, trainable=EVERYTHING):
    """Forward and backward, twice the forward, of layers that have them."""
    first = layers_without_backward(model, trainable)
    pairs = [
        causal_pairs(0, length, window=model.layer_type(i).window) for i in range(model.num_layers)
    ]
    each = 4 * model.num_heads * model.head_dim
    return each * sum(pairs), 2 * each * sum(pairs[first:])


ATTENTION_ALONE = [variant for variant in VARIANTS if variant != HYBRID]
"""Models without the rule, whose chunks are filled up with tokens that change nothing."""
TRAINABLE = {
    "everything": EVERYTHING,
    "adapters": Trainable(Adapter(3, 0.5), ()),
    "adapters of layer 1, norms": Trainable(Adapter(2, 2.0, ("q", "v", "up"), (1,)), ("*norm.*",)),
    "k of layer 1, head": Trainable(None, ("layers.1.k.*", "head.*")),
}


@pytest.mark.parametrize(
    ("variant", "policy", "trains"), each_once(ATTENTION_ALONE, POLICIES, TRAINABLE)
)
def test_executed_products_are_those_counted(variant, policy, trains):
    model, trainable = tiny_model(variant), TRAINABLE[trains]
    weights = random_weights(model, trainable=trainable)
    trained = Trained(model, weights, policy=policy, trainable=trainable)
    sequences = [random_sequence(model, 23, seed=seed) for seed in range(2)]
    with ProductFlops() as counted:
        trained.step(sequences, [(0, 5, 6, 23), (0, 23)])
    forward, backward = (2 * flops for flops in attention_flops(model, 23, trainable))
    passes = forward + (1.25 + (policy == "recompute") / 2) * backward
    expected = 0
    for cuts in ((0, 5, 6, 23), (0, 23)):
        lengths = np.diff(cuts)
        recomputed = np.zeros((1, len(lengths), 3), dtype=np.int64)
        recomputed[:, :, LINEAR] = lengths * (policy != "retain")
        recomputed[:, :, ATTENTION] = lengths * (policy == "recompute")
        retained = lengths[None, :, None] - recomputed
        expected += executed_flops(
            Candidate(
                Workload(model, PRESETS["laptop-cpu"], trainable=trainable), tuple(lengths.tolist())
            ),
            ActivationPlacement(retained, 0 * recomputed, recomputed),
        )
    ignored = sum(23 - data.num_valid for data in sequences)
    assert ignored
    assert counted.flops == expected - passes - ignored_flops(model, ignored, trainable)


@pytest.mark.parametrize("variant", ATTENTION_ALONE)
def test_forward_products_are_those_counted(variant):
    model = tiny_model(variant)
    trained = Trained(model, random_weights(model))
    with ProductFlops() as counted:
        trained.engine.evaluate(random_sequence(model, 23, ignored=0.0), (0, 5, 6, 23))
    expected, _ = model_flops(model, start=0, end=23)
    assert counted.flops == expected - attention_flops(model, 23)[0]
    assert step_flops(model, length=23, sequences=3) == 9 * expected


def test_a_published_shape_by_hand():
    """Llama 3.1 8B: 2 FLOPs for each of 6.98e9 layer weights and 0.525e9 of the head, per token."""
    model = ModelConfig.model_validate(MODELS["llama-3.1-8b"])
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336
    (kind,) = kinds_of_model(model, EVERYTHING)
    assert layer_flops(kind) == (2 * layer, 4 * layer)
    assert pair_flops(model, kind) == 4 * 4096
    assert head_flops(model) == (2 * 128256 * 4096, 4 * 128256 * 4096)
    linear, quadratic = partition_costs(model)
    assert linear == 2 * (32 * layer + 128256 * 4096)
    assert quadratic == 32 * 4 * 4096
    tokens = 8192
    total = linear * tokens + quadratic * tokens * (tokens + 1) / 2
    assert model_flops(model, start=0, end=tokens) == (total, 2 * total)


def test_partition_costs_of_windows_are_per_token():
    model = tiny_model("window from layer 1, llama3")  # one of two layers sees 3 keys
    linear, quadratic = partition_costs(model)
    per_pair = 4 * model.num_heads * model.head_dim
    assert quadratic == per_pair
    plain_linear, plain_quadratic = partition_costs(tiny_model(num_kv_heads=2))
    assert plain_quadratic == 2 * per_pair
    assert linear == plain_linear + 3 * per_pair


def test_of_experts_those_of_a_token_count():
    """Qwen3-30B-A3B: 8 of 128 experts of 3 x 2048 x 768, beside attention and the router."""
    model = ModelConfig.model_validate(MODELS["qwen3-30b-a3b"])
    (kind,) = kinds_of_model(model, EVERYTHING)
    attention, experts = 2048 * (2 * 4096 + 2 * 512), 8 * 3 * 2048 * 768
    forward = 2 * (attention + 2048 * 128 + experts)
    assert layer_flops(kind) == (forward, 2 * forward)
    again = 2048 * (2 * 4096 + 512) + 8 * 2 * 2048 * 768
    assert recomputed_linear_flops(model, kind) == 2 * again


def test_layers_with_linear_attention_have_their_rule_in_place_of_pairs():
    """Qwen3.5-9B by hand: 24 of 32 layers, 16 key heads and 32 value heads of 128."""
    model = ModelConfig.model_validate(MODELS["qwen3.5-9b"])
    counts = {kind.type.linear: (kind, n) for kind, n in kinds_of_model(model, EVERYTHING).items()}
    (linear, layers), (full, others) = counts[True], counts[False]
    assert (layers, others) == (24, 8)
    weights = 4096 * (8192 + 4096 + 2 * 32) + 4096 * 4096 + 3 * 4096 * 12288
    rule = 32 * (6 * 128 * 128 + 64 * (2 + 4) * 128) + 16 * 4 * 64 * 128
    assert layer_flops(linear) == (2 * weights + rule, 4 * weights + 2 * rule)
    gated = 4096 * (2 * 4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288
    assert layer_flops(full) == (2 * gated, 4 * gated)
    assert (pair_flops(model, linear), pair_flops(model, full)) == (0, 4 * 4096)
    assert partition_costs(model)[1] == 8 * 4 * 4096
    assert recomputed_linear_flops(model, linear) == 2 * (weights - 4096 * 12288)


@pytest.mark.parametrize("policy", POLICIES)
def test_executed_products_of_a_hybrid_are_those_counted(policy):
    """Without those of the rule, which have batches of heads."""
    linear = {"key_heads": 2, "value_heads": 4, "key_size": 6, "value_size": 8}
    layers = {"layer_types": ["linear", "full"], "linear_attention": linear}
    model = tiny_model(attention_gate=True, **layers)
    data, lengths = random_sequence(model, 23, ignored=0.0), np.array([5, 1, 17])
    with ProductFlops() as counted:
        Trained(model, random_weights(model), policy=policy).step([data], [(0, 5, 6, 23)])
    recomputed = np.zeros((1, 3, 3), dtype=np.int64)
    recomputed[:, :, LINEAR] = lengths * (policy != "retain")
    recomputed[:, :, ATTENTION] = lengths * (policy == "recompute")
    products, _, rule = flops_of_parts(
        Candidate(Workload(model, PRESETS["laptop-cpu"]), tuple(lengths.tolist())),
        ActivationPlacement(lengths[None, :, None] - recomputed, 0 * recomputed, recomputed),
    )
    assert counted.flops == products
    assert rule > 0


@pytest.mark.parametrize("key_heads", [1, 3])
def test_products_of_the_rule_are_those_counted(key_heads):
    """torch does not count the solution of the triangular system, nor products added in place."""
    linear = LinearAttention(key_heads=key_heads, value_heads=3, key_size=32, value_size=64)
    tokens, (heads, keys, values) = 2 * CHUNK_TOKENS, (3, 32, 64)
    shapes = [(tokens, key_heads, keys)] * 2 + [(tokens, heads, values)] + [(tokens, heads)] * 2
    *inputs, state = (torch.rand(shape) for shape in [*shapes, (heads, keys, values)])
    operands = [x.requires_grad_() for x in (*inputs, state)]
    rule = chunked_rule.RuleOperands(*inputs, state)
    custom = {torch.ops.aten.baddbmm_: lambda total, a, b, **_: 2 * prod(a) * b[-1]}

    def counted(function):
        with FlopCounterMode(display=False, custom_mapping=custom) as counter:
            found = function()
        return found, counter.get_total_flops() // tokens

    of_outputs, forward = counted(lambda: chunked_rule.chunked_rule(rule))
    _, backward = counted(lambda: torch.autograd.grad(of_outputs, operands, of_outputs))
    _, again = counted(lambda: chunked_rule.chunked_state(rule))
    solution = 2 * CHUNK_TOKENS * heads * (keys + values)
    assert rule_flops(linear) == forward + solution
    assert 2 * rule_flops(linear) == backward + solution
    assert repeated_rule_flops(linear) == 2 * forward + again + 3 * solution
