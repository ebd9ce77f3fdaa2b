"""AdamW and clipping against torch's own, bit for bit."""

import pytest
import torch

from sppo.config.optimizer import OptimizerConfig
from sppo.cost.parameters import is_decayed
from sppo.optim.adamw import AdamW
from sppo.optim.gradient_norm import clip_, global_norm

SHAPES = {
    "embed.weight": (37, 24),
    "layers.0.q.weight": (24, 24),
    "layers.0.q.bias": (24,),
    "layers.0.attention_norm.weight": (24,),
    "head.weight": (37, 24),
}
CONFIG = OptimizerConfig(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def _tensors(seed, *, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator) * scale for n, s in SHAPES.items()}


class _Plain:
    """What people write without this package: parameters, torch's AdamW, torch's clipping."""

    def __init__(self, weights):
        self.parameters = {n: torch.nn.Parameter(w.clone()) for n, w in weights.items()}
        decayed = [p for n, p in self.parameters.items() if is_decayed(n)]
        others = [p for n, p in self.parameters.items() if not is_decayed(n)]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            betas=(0.9, 0.95),
            eps=1e-8,
            fused=True,
        )

    def step(self, gradients, *, lr, clip_norm):
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), clip_norm)
        self.optimizer.step()
        return norm


def _our_step(optimizer, gradients, *, lr, clip_norm):
    norm = global_norm(gradients)
    clip_(gradients, norm=norm, clip_norm=clip_norm)
    optimizer.step(gradients, lr=lr)
    return norm


def _assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_fp32_training_is_bitwise_torch_adamw_with_clipping():
    weights = _tensors(0)
    plain, optimizer = _Plain(weights), AdamW(weights, config=CONFIG)
    for step in range(6):
        # The first gradients are far below the clipping norm, the later ones above.
        gradients = _tensors(step + 1, scale=1e-3 if step < 2 else 3.0)
        expected = plain.step(gradients, lr=1e-2 / (step + 1), clip_norm=1.0)
        norm = _our_step(optimizer, gradients, lr=1e-2 / (step + 1), clip_norm=1.0)
        assert torch.equal(norm, expected)
        _assert_same(weights, plain.parameters)
    assert optimizer.steps == 6


def test_bf16_weights_are_the_rounded_masters_of_an_fp32_run():
    exact = _tensors(0)
    weights = {name: tensor.bfloat16() for name, tensor in exact.items()}
    plain = _Plain(exact)
    optimizer = AdamW(weights, config=CONFIG, masters={n: t.clone() for n, t in exact.items()})
    for step in range(4):
        gradients = _tensors(step + 1)
        plain.step(gradients, lr=1e-4, clip_norm=1.0)
        _our_step(optimizer, gradients, lr=1e-4, clip_norm=1.0)
    state = optimizer.state()
    for name, parameter in plain.parameters.items():
        assert torch.equal(state[f"model.{name}"], parameter)
        assert torch.equal(weights[name], parameter.bfloat16())


def test_masters_keep_updates_too_small_for_bf16():
    weights = {"head.weight": torch.ones(4, 4, dtype=torch.bfloat16)}
    optimizer = AdamW(weights, config=CONFIG)
    for _ in range(40):
        optimizer.step({"head.weight": torch.ones(4, 4)}, lr=1e-4)
    assert weights["head.weight"].max().item() < 1.0


def test_clip_norm_zero_leaves_gradients_alone():
    gradients = _tensors(3, scale=100.0)
    before = {name: tensor.clone() for name, tensor in gradients.items()}
    clip_(gradients, norm=global_norm(gradients), clip_norm=0.0)
    _assert_same(gradients, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_of_step_zero_holds_zero_moments(dtype):
    weights = {name: tensor.to(dtype) for name, tensor in _tensors(0).items()}
    state = AdamW(weights, config=CONFIG).state()
    assert state["optimizer.step"].item() == 0
    for name in SHAPES:
        assert state[f"model.{name}"].dtype == torch.float32
        for moment in ("exp_avg", "exp_avg_sq"):
            assert not state[f"optimizer.{moment}.{name}"].any()
    assert len(state) == 3 * len(SHAPES) + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_resumed_optimizer_goes_on_bitwise(dtype, in_place):
    def narrow(seed):
        return {name: tensor.to(dtype) for name, tensor in _tensors(seed).items()}

    weights = narrow(0)
    whole = AdamW(weights, config=CONFIG)
    for step in range(3):
        whole.step(_tensors(step + 1), lr=1e-3)
    saved = {key: tensor.clone() for key, tensor in whole.state().items()}

    resumed_weights = narrow(99)
    resumed = AdamW(resumed_weights, config=CONFIG)
    if in_place:
        state = resumed.state()
        for key, tensor in state.items():
            tensor.copy_(saved[key])
        resumed.load_state(state)
    else:
        resumed.load_state(saved)
    assert resumed.steps == 3
    _assert_same(resumed_weights, weights)
    for step in range(3, 6):
        whole.step(_tensors(step + 1), lr=1e-3)
        resumed.step(_tensors(step + 1), lr=1e-3)
    _assert_same(resumed_weights, weights)
    _assert_same(resumed.state(), whole.state())
