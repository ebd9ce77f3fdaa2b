"""Kernels and matrix FLOPs of the planner against those counted while a model trains."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sppo.activations.policy import saved_tensors
from sppo.config.model import ModelConfig
from sppo.cost.candidate import Candidate
from sppo.cost.elementwise.layer_work import PASSES, layer_work, saving_work
from sppo.cost.layer import update_seconds
from sppo.cost.parameters import layer_shapes
from sppo.cost.stages.seconds import stage_seconds
from sppo.cost.workload import Workload
from sppo.engine.attention.kv_store import StoredKV
from sppo.engine.engine import Engine
from sppo.engine.unit import SequenceData
from sppo.hardware.presets import PRESETS
from sppo.hardware.rates import AttentionPoint, ElementwisePoint, GemmPoint
from sppo.kernels import elementwise
from sppo.model import attention_mixer, gradients, heads
from sppo.model.gradients import zero_gradients
from sppo.model.initialize import initial_weights
from sppo.offload.retained import RetainedTensors

BASE = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 8,
    "mlp_size": 24,
    "max_positions": 64,
}
GPT = {
    "norm": "layernorm",
    "mlp": "gelu_tanh",
    "position": "learned",
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
}
MODELS = {
    "llama": {},
    "qwen3": {"qk_norm": True},
    "gpt": GPT,
    "gpt, rotary, exact gelu": {**GPT, "position": "rotary", "mlp": "gelu"},
    "qwen2": {"qkv_bias": True},
    "norms of outputs": {"norm_placement": "post", "residual_scale": 0.5},
    "sinks": {"attention_sinks": True, "mlp": "swiglu_clamped", "mlp_bias": True},
    "one norm of all heads": {"qk_norm": "all", "mlp": "relu2", "rotary_fraction": 0.5},
    "norms of both": {"norm_placement": "both", "norm": "layernorm", "mlp_bias": True},
}
CUTS = (0, 12, 20)
# Work that no function of ours stands for: additions in place, and conversions.
UNSEEN = {"add", "scale", "narrow", "loss_gradient", "adamw"}
RATE = 1e9


def model_of(name):
    return ModelConfig.model_validate({**BASE, **MODELS[name]})


@pytest.fixture
def counted(monkeypatch):
    """Elements that every kernel worked on since the fixture was made."""
    elements = Counter()

    def watch(where, name, kernel):
        original = getattr(where, name)

        def watched(*args, **kwargs):
            key, size = kernel(*args, **kwargs)
            elements[key] += size
            return original(*args, **kwargs)

        monkeypatch.setattr(where, name, watched)

    def norm(operands, suffix):
        def kernel(x, *others, dresidual_CE=None, **_):
            added = "" if dresidual_CE is None else "_add"
            name = "rmsnorm" if others[operands - 1].bias_E is None else "layernorm"
            return ("head_norm" if x.dim() == 3 else name) + added + suffix, x.numel()

        return kernel

    watch(elementwise, "norm", norm(1, ""))
    watch(elementwise, "add_norm_", norm(2, "_add"))
    watch(elementwise, "norm_backward", norm(2, "_backward"))
    watch(elementwise, "activation", lambda gate, up, *, kind: (kind, up.numel()))
    watch(
        elementwise,
        "activation_backward_",
        lambda d, gate, up, *, kind: (f"{kind}_backward", up.numel()),
    )
    watch(heads, "rotate", lambda x, table: ("rotary", x.numel()))
    watch(heads, "rotate_backward", lambda x, table: ("rotary", x.numel()))
    watch(attention_mixer, "apply_sinks_", lambda o, lse, sinks: ("sinks", o.numel()))
    watch(attention_mixer, "sink_gradient", lambda do, o, lse, sinks: ("sink_gradient", o.numel()))
    watch(gradients, "accumulate_bias_gradient", lambda total, dy: ("bias_gradient", dy.numel()))
    watch(
        StoredKV,
        "write",
        lambda kv, k_CKD, v_CKD: ("copy", k_CKD.numel() + v_CKD.numel()),
    )
    watch(
        RetainedTensors,
        "put",
        lambda stack, key, tensors: (
            "save",
            sum(t.numel() for name, t in tensors.items() if name not in ("lse", "dx")),
        ),
    )
    return elements


@torch.no_grad()
def train_once(model, *, policy):
    """Forward and backward of one sequence; matrix FLOPs of both."""
    weights = initial_weights(model, seed=0)
    engine = Engine(model, weights=weights, gradients=zero_gradients(weights), policy=policy)
    tokens = torch.arange(CUTS[-1] + 1) % model.vocab_size
    # torch counts mm and addmm, and knows nothing of the product that adds in place.
    in_place = {torch.ops.aten.addmm_: lambda total, a, b, **_: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        engine.accumulate([SequenceData(tokens[:-1], tokens[1:])], [CUTS])
    return counter.get_total_flops()


@pytest.mark.parametrize("policy", ["retain", "keep_attention"])
@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_of_a_step_is_counted(counted, name, policy):
    model = model_of(name)
    train_once(model, policy=policy)
    passes = layer_work(model, model.layer_type(0), element_bytes=4, trained=layer_shapes(model, 0))
    work = passes["forward"] + passes["backward"]
    work += saving_work(
        model, model.layer_type(0), names=saved_tensors(policy, model, model.layer_type(0))
    )
    if policy == "keep_attention":
        work += passes["linear_recompute"]
    expected = Counter()
    for kernel, width in work:
        expected[kernel] += width * model.num_layers * CUTS[-1]
    for kernel in (model.norm, f"{model.norm}_backward"):  # of the last norm
        expected[kernel] += model.hidden_size * CUTS[-1]
    for kernel in UNSEEN:
        del expected[kernel]
    assert counted == expected


def perfect(*, gemm=RATE, elementwise=1e30):
    """A CPU whose kernels take as long as their FLOPs or bytes say, whatever their shape."""
    preset = PRESETS["laptop-cpu"]
    device = replace(
        preset.device,
        gemm_points=(GemmPoint("fp32", 1, 1, gemm, gemm, gemm),),
        attention_points=(AttentionPoint("fp32", 8, 1, 1, 1e30, 1e30),),
        elementwise_points=tuple(
            ElementwisePoint(kernel, "fp32", 1, elementwise) for kernel in PASSES
        ),
        kernel_s=0.0,
    )
    return replace(preset, device=device)


def step_seconds(model, hardware, *, policy):
    lengths = tuple(b - a for a, b in zip(CUTS, CUTS[1:], strict=False))
    candidate = Candidate(Workload(model, hardware, dtype="fp32"), lengths)
    units = stage_seconds(candidate)
    total = units.forward + units.backward + units.weight
    return float((total + (units.linear_recompute if policy == "keep_attention" else 0)).sum())


@pytest.mark.parametrize("policy", ["retain", "keep_attention"])
@pytest.mark.parametrize("name", MODELS)
def test_matrix_products_of_a_step_are_the_flops_that_ran(name, policy):
    """Attention's own products are not among those torch counts here."""
    model = model_of(name)
    flops = train_once(model, policy=policy)
    assert step_seconds(model, perfect(), policy=policy) == pytest.approx(flops / RATE)


def test_a_gpu_keeps_saved_tensors_in_place():
    """So recomputing saves it no copies, and forward has none."""
    model = model_of("llama")
    cpu = perfect(gemm=1e30, elementwise=1e6)
    gpu = replace(cpu, device=replace(cpu.device, kind="cuda"))
    tokens = CUTS[-1] * model.num_layers
    copied = sum(
        2 * 4 * width for _, width in saving_work(model, model.layer_type(0), names=("x_in", "o"))
    )
    retained = [step_seconds(model, machine, policy="keep_attention") for machine in (cpu, gpu)]
    assert retained[0] - retained[1] == pytest.approx(copied * tokens / 1e6)


def test_an_update_writes_narrow_weights_from_their_masters():
    hardware, parameters = PRESETS["laptop-cpu"], np.array([1e6])
    offloaded = {
        dtype: update_seconds(
            Workload(model_of("llama"), hardware, dtype=dtype), parameters=parameters
        )
        * hardware.device.memory_bytes_per_s
        for dtype in ("bf16", "fp32")
    }
    assert offloaded["fp32"] == pytest.approx(44 * 1e6)
    assert offloaded["bf16"] == pytest.approx((44 + 6) * 1e6)
    narrow = Workload(model_of("llama"), hardware, dtype="bf16", moments="bf16")
    seconds = update_seconds(narrow, parameters=parameters)
    converted = 2 * (2 * 2 + 2 * 4)  # both moments are read and written in both precisions
    assert seconds * hardware.device.memory_bytes_per_s == pytest.approx((50 + converted) * 1e6)
