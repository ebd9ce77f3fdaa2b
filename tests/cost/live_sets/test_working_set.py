"""Predicted working set against the allocations of torch's CPU allocator during training."""

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch

from sppo.activations.policy import POLICIES
from sppo.activations.tensor_classes import ATTENTION, LINEAR
from sppo.config.model import ModelConfig
from sppo.cost.layer_kinds import layer_kinds
from sppo.cost.live_sets import working_set as planned
from sppo.cost.workload import Workload
from sppo.engine.engine import Engine
from sppo.engine.pipeline import Pipeline
from sppo.engine.unit import SequenceData
from sppo.hardware.presets import PRESETS
from sppo.kernels import half_products
from sppo.kernels.attention import cpu_flash
from sppo.kernels.labels import IGNORED_LABEL
from sppo.model.gradients import zero_gradients
from sppo.model.initialize import initial_weights
from sppo.planning.evaluation_plan import plan_evaluation
from sppo.training.state import DTYPES
from tests.cost.pool import peak_beyond, peak_of_step, threads
from tests.make import make_run
from tests.tiers import each_once, exhaustive

LLAMA = {"hidden_size": 512, "num_heads": 8, "num_kv_heads": 2, "mlp_size": 1408}
SHAPES = {
    "llama": {"vocab_size": 1024, **LLAMA},
    "one key head": {"vocab_size": 512, **LLAMA, "num_kv_heads": 1},
    "qwen3": {
        "vocab_size": 4096, "hidden_size": 320, "num_heads": 8, "num_kv_heads": 4,
        "head_size": 64, "mlp_size": 1024, "qk_norm": True,
    },
    "gpt": {
        "vocab_size": 512, "hidden_size": 512, "num_heads": 8, "mlp_size": 2048,
        "mlp": "gelu_tanh", "norm": "layernorm", "position": "learned", "max_positions": 8192,
        "qkv_bias": True, "output_bias": True, "mlp_bias": True,
    },
    "norms of outputs": {"vocab_size": 512, **LLAMA, "mlp_size": 768, "norm_placement": "post"},
    "norms of both": {"vocab_size": 512, **LLAMA, "mlp_size": 768, "norm_placement": "both"},
    "large vocabulary": {
        "vocab_size": 16384, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "mlp_size": 256,
    },
}  # fmt: skip
RECOMPUTED = {
    "retain": frozenset(),
    "keep_attention": frozenset((LINEAR,)),
    "recompute": frozenset((ATTENTION, LINEAR)),
}
LAYERS = 2
THREADS_BYTES = 1 << 20
"""Scratch of threads that need not have theirs at the same time."""


def model_of(shape: str) -> ModelConfig:
    return ModelConfig(num_layers=LAYERS, **SHAPES[shape])


def measured(model, *, dtype, policy, lengths, input_every, ignored=(), recomputes_windows=False):
    """Peak of a step beyond what outlives it; the labels at ``ignored`` do not count."""
    weights = {n: w.to(DTYPES[dtype]) for n, w in initial_weights(model, seed=0).items()}
    engine = Engine(
        model,
        weights=weights,
        gradients=zero_gradients(weights),
        policy=policy,
        pipeline=Pipeline(input_every=input_every, recomputes_windows=recomputes_windows),
    )
    tokens = torch.arange(sum(lengths) + 1) % model.vocab_size
    cuts, labels = [*accumulate(lengths, initial=0)], tokens[1:].clone()
    labels[list(ignored)] = IGNORED_LABEL
    return peak_of_step(engine, SequenceData(tokens[:-1], labels), cuts)


def machine():
    """The preset, with products in half precision as on this machine."""
    laptop = PRESETS["laptop-cpu"]
    half = not half_products.needs_casts(torch.empty(0, dtype=torch.bfloat16))
    return replace(laptop, device=replace(laptop.device, half_products=half))


def predicted(model, *, dtype, policy, lengths, input_every, recomputes_windows=False):
    workload = Workload(model, machine(), dtype=dtype)
    prefixes = [sum(lengths[:i]) for i in range(len(lengths))]
    moments = [
        moment
        for tokens, prefix in zip(lengths, prefixes, strict=True)
        for kind in set(layer_kinds(model, workload.trainable))
        for moment in planned.working_sets(
            workload,
            tokens=tokens,
            prefix=prefix,
            recomputed=RECOMPUTED[policy],
            input_every=input_every,
            layers=LAYERS,
            kind=kind,
            recomputes_windows=recomputes_windows,
        )
    ]
    return max(*moments, planned.loss_working_set(workload, tokens=max(lengths)), key=live)


def live(moment):
    return moment[1]


@pytest.mark.parametrize(
    ("shape", "policy", "dtype"), each_once(SHAPES, POLICIES, ["bf16", "fp32"])
)
def test_it_is_what_the_allocator_hands_out(shape, policy, dtype):
    case = {"dtype": dtype, "policy": policy, "lengths": (800, 1024), "input_every": 1}
    seen = measured(model_of(shape), **case)
    moment = predicted(model_of(shape), **case)
    assert seen == pytest.approx(live(moment), rel=0.03, abs=THREADS_BYTES), moment


@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        ("gpt", (512, 1024)),
        pytest.param("gpt", (2304,), marks=pytest.mark.exhaustive),
        pytest.param("one key head", (2304,), marks=pytest.mark.exhaustive),
    ],
)
def test_a_cpu_without_products_in_half_precision(monkeypatch, shape, lengths):
    for module in (half_products, cpu_flash):
        monkeypatch.setattr(module, "cpu_multiplies", lambda dtype: dtype is torch.float32)
    case = {"dtype": "bf16", "policy": "retain", "lengths": lengths, "input_every": 1}
    seen = measured(model_of(shape), **case)
    moment = predicted(model_of(shape), **case)
    assert seen == pytest.approx(live(moment), rel=0.03, abs=THREADS_BYTES), moment


@pytest.mark.parametrize(
    ("lengths", "policy", "input_every"),
    [
        ((1024,) * 2, "keep_attention", 2),
        pytest.param((3072, 512), "retain", 1, marks=pytest.mark.exhaustive),
        pytest.param((2500, 600), "recompute", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_squares_that_are_halved_and_layers_that_share_an_input(lengths, policy, input_every):
    case = {"dtype": "bf16", "policy": policy, "lengths": lengths, "input_every": input_every}
    seen = measured(model_of("llama"), **case)
    moment = predicted(model_of("llama"), **case)
    assert seen == pytest.approx(live(moment), rel=0.05, abs=THREADS_BYTES), moment


@pytest.mark.parametrize(
    ("policy", "window", "recomputes"),
    [
        ("retain", 300, False),
        ("keep_attention", 1500, True),
        pytest.param("recompute", 300, True, marks=pytest.mark.exhaustive),
        pytest.param("recompute", 1500, False, marks=pytest.mark.exhaustive),
    ],
)
def test_keys_in_windows_are_put_together(policy, window, recomputes):
    """With so few layers of such narrow MLPs, attention takes most."""
    model = ModelConfig(
        num_layers=LAYERS,
        **{**SHAPES["llama"], "num_kv_heads": 8, "mlp_size": 64, "hidden_size": 256},
        head_size=64,
        sliding_window=window,
    )
    case = {"dtype": "fp32", "policy": policy, "lengths": (1024, 512, 1024), "input_every": 1}
    case["recomputes_windows"] = recomputes
    seen = measured(model, **case)
    moment = predicted(model, **case)
    assert moment[0].startswith("attention backward")
    assert seen == pytest.approx(live(moment), rel=0.05, abs=THREADS_BYTES), moment


@pytest.mark.parametrize("dtype", ["fp32", *exhaustive("bf16")])
def test_selected_rows_of_the_head_take_no_more(dtype):
    """With one label masked nearly all rows are copied; the peak is in the head."""
    shape = {"hidden_size": 512, "num_heads": 1, "head_size": 64, "mlp_size": 64}
    model = ModelConfig(num_layers=1, vocab_size=12288, **shape)
    case = {"dtype": dtype, "policy": "recompute", "lengths": (512,), "input_every": 1}
    whole = measured(model, **case)
    assert measured(model, **case, ignored=[5]) <= 1.005 * whole
    assert measured(model, **case, ignored=range(0, 512, 2)) < 0.8 * whole


def test_an_evaluation_needs_what_is_predicted():
    model = model_of("llama")
    tokens = torch.arange(2049) % model.vocab_size
    data = SequenceData(tokens[:-1], tokens[1:])
    weights = {n: w.to(DTYPES["bf16"]) for n, w in initial_weights(model, seed=0).items()}
    engine = Engine(model, weights=weights, gradients=None)
    with threads(2):
        seen, _ = peak_beyond(lambda: engine.evaluate(data, (0, 1024, 2048)))
    seen += sum(weight.nbytes for weight in weights.values())
    keys = model.model_dump(mode="json", exclude_none=True)
    run = make_run(keys, length=2048, sequence={"num_subsequences": 2})
    plan = plan_evaluation(run, hardware=machine(), lengths=[2048], room_bytes=1 << 40)
    (found,) = plan.rows.memory
    held = found.weights_bytes + found.kv_bytes + found.working_bytes
    assert plan.rows.boundaries == (0, 1024, 2048)
    assert held == pytest.approx(seen, rel=0.03)


@pytest.mark.parametrize("machine", ["h100", "laptop-cpu"])
@pytest.mark.parametrize("window", [None, 40000])
def test_longer_prefixes_take_no_more(machine, window):
    model = ModelConfig(**SHAPES["llama"], num_layers=2, sliding_window=window)
    workload = Workload(model, PRESETS[machine])
    prefixes = np.array([17_000, 50_000, 1 << 25])
    shorter = planned.same_prefixes(workload, tokens=np.full(3, 8192), prefixes=prefixes)
    for prefix, same in zip(prefixes.tolist(), shorter.tolist(), strict=True):
        assert same < prefix or window == 40_000
        found = [
            planned.working_sets(workload, tokens=8192, prefix=p, recomputed=frozenset(), layers=2)
            for p in (prefix, same)
        ]
        assert found[0] == found[1]
