"""Tiny models, data and cuts for engine tests; weights are random everywhere and of different size.

Norm weights of one and biases of zero would hide a norm or bias that is forgotten.
"""

from __future__ import annotations

from types import MappingProxyType

import torch

from sppo.config.model import ModelConfig
from sppo.config.routing import NO_ROUTING_LOSSES
from sppo.cost.trainable import EVERYTHING
from sppo.engine.engine import Engine
from sppo.engine.unit import SequenceData
from sppo.kernels.cross_entropy import CROSS_ENTROPY
from sppo.kernels.labels import IGNORED_LABEL
from sppo.model.gradients import zero_gradients
from tests.engine.reference import merged, reference_loss
from tests.random_training.case import EXPERTS, FAMILIES, LINEAR_ATTENTION, ROPES

BASE = {
    "vocab_size": 23,
    "hidden_size": 12,
    "num_layers": 2,
    "num_heads": 4,
    "head_size": 6,  # E = 12 is not N * D = 24
    "mlp_size": 18,
    "max_positions": 64,
}
HYBRID = "linear attention, gated attention"
GPT = {**FAMILIES["gpt2"], "tie_embeddings": True}
VARIANTS = {
    "mha": {},
    "gqa, q/k-norm": {"num_kv_heads": 2, "qk_norm": True},
    "mqa, window, biases": {"num_kv_heads": 1, "sliding_window": 5, "qkv_bias": True},
    "window from layer 1, llama3": {
        "num_kv_heads": 2,
        "sliding_window": 3,
        "sliding_window_first_layer": 1,
        "rope_scaling": ROPES["llama3"],
    },
    "tied, yarn, all biases": {
        **FAMILIES["llama, biases"],
        "tie_embeddings": True,
        "rope_scaling": ROPES["yarn"],
    },
    "gpt": GPT,
    "gpt, exact gelu, untied, mqa": {
        **GPT,
        "mlp": "gelu",
        "tie_embeddings": False,
        "num_kv_heads": 1,
    },
    "mixed: layernorm, rotary, q/k-norm, linear": {
        **FAMILIES["layernorm, rotary, q/k-norm, gelu"],
        "num_kv_heads": 2,
        "rope_scaling": ROPES["linear"],
    },
    "learned positions, q/k-norm, swiglu": {"position": "learned", "qk_norm": True},
    "olmo: post norms, q/k-norm of all heads": FAMILIES["olmo"],
    "gemma: norms on both sides": {**FAMILIES["gemma"], "num_kv_heads": 2},
    "gpt-oss: sinks, window": {**FAMILIES["gpt-oss"], "num_kv_heads": 2},
    "granite: scales, no rotation in layer 1": FAMILIES["granite"],
    "glm: both norms, partial rotation": {
        **FAMILIES["glm"],
        "num_kv_heads": 1,
        "rotary_fraction": 0.7,
    },
    "attention gate": {"attention_gate": True, "num_kv_heads": 2, "qk_norm": "head"},
    "experts": {"experts": EXPERTS["softmax"], "num_kv_heads": 2},
    "experts, first layer dense": {"experts": EXPERTS["glm"], "num_kv_heads": 1},
    HYBRID: {
        "layer_types": ["linear", "full"],
        "linear_attention": LINEAR_ATTENTION,
        "attention_gate": True,
        "num_kv_heads": 2,
    },
}


def tiny_model(variant="mha", **fields):
    return ModelConfig.model_validate({**BASE, **VARIANTS[variant], **fields})


def random_weights(model, *, seed=0, dtype=torch.float64, trainable=EVERYTHING):
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in trainable.parameter_shapes(model).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        if len(shape) >= 2 and not name.endswith("bias"):
            weight = noise * (0.7 if "embed" in name or "positions" in name else shape[-1] ** -0.5)
        elif name.endswith("norm.weight"):
            weight = 0.4 * noise + (not model.norm_offset)
        elif name.endswith("decay.log_rate"):
            weight = noise
            weight[::2] -= 4  # or no state would reach beyond a few tokens
        else:
            weight = 0.5 * noise
        weights[name] = weight.to(dtype)
    return weights


def random_sequence(model, length, *, seed=0, ignored=0.15, starts=(0,)):
    generator = torch.Generator().manual_seed(1000 + seed)
    tokens = torch.randint(0, model.vocab_size, (length + 1,), generator=generator)
    labels = tokens[1:].clone()
    labels[torch.rand(length, generator=generator) < ignored] = IGNORED_LABEL
    labels[length // 2] = tokens[length // 2 + 1]  # at least one counts
    return SequenceData(tokens[:-1], labels, tuple(starts))


class Trained:
    """An engine with its own gradient buffers."""

    def __init__(self, model, weights, *, policy="retain", trainable=EVERYTHING, **options):
        self.gradients = zero_gradients(weights, trainable=trainable)
        self.engine = Engine(
            model,
            weights=weights,
            gradients=self.gradients,
            policy=policy,
            trainable=trainable,
            debug=True,
            **options,
        )

    def step(self, sequences, cuts, **options):
        """Mean loss and gradients of one step from zero."""
        for gradient in self.gradients.values():
            gradient.zero_()
        done = self.engine.accumulate(sequences, cuts, **options)
        gradients = {name: gradient.clone() for name, gradient in self.gradients.items()}
        return done.total_loss / done.num_valid, gradients


def engine_step(model, weights, sequences, cuts, *, policy="retain"):
    return Trained(model, weights, policy=policy).step(sequences, cuts)


def autograd_step(
    model,
    weights,
    sequences,
    *,
    terms=CROSS_ENTROPY,
    trainable=EVERYTHING,
    routing=NO_ROUTING_LOSSES,
    choice_biases=MappingProxyType({}),
):
    leaves = {n: w.detach().clone().requires_grad_(trainable.trains(n)) for n, w in weights.items()}
    whole = {**merged(leaves, trainable), **choice_biases}
    loss = reference_loss(model, whole, sequences, terms=terms, routing=routing)
    loss.backward()
    return loss.detach(), {n: leaf.grad for n, leaf in leaves.items() if leaf.requires_grad}


def assert_same_step(actual, expected, *, tolerance):
    """Loss and every gradient within ``tolerance`` of its own largest value.

    A gradient that is zero but for rounding (GPT-2's key bias) is held to a thousandth of the
    largest of all.
    """
    (loss, gradients), (expected_loss, expected_gradients) = actual, expected
    assert abs(float(loss - expected_loss)) <= tolerance * abs(float(expected_loss))
    assert gradients.keys() == expected_gradients.keys()
    largest = max(float(g.abs().max()) for g in expected_gradients.values())
    for name, gradient in expected_gradients.items():
        error = float((gradients[name] - gradient).abs().max())
        bound = tolerance * max(float(gradient.abs().max()), 1e-3 * largest)
        assert error <= bound, f"{name}: {error:.2e} above {bound:.2e}"


def assert_equal_bits(actual, expected):
    assert torch.equal(actual[0], expected[0])
    different = [n for n, g in expected[1].items() if not torch.equal(actual[1][n], g)]
    assert not different
