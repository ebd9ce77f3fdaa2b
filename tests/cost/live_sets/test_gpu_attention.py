"""Planned memory of attention in plain torch operations, against what its calls allocate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sppo.config.model import ModelConfig
from sppo.cost.live_sets import gpu_attention_live_sets as planned
from sppo.cost.live_sets.tensor_sizes import TensorSizes
from sppo.cost.workload import Workload
from sppo.hardware.presets import PRESETS
from sppo.kernels.attention import torch_blocks
from sppo.kernels.attention.call import AttentionCall
from sppo.kernels.attention.choice import KERNELS
from tests.kernels.allocations import peak_bytes

HEAD_SIZE = 32


@pytest.mark.parametrize(
    ("dtype", "tokens", "prefix", "heads", "window"),
    [
        (torch.float32, 2100, 0, (4, 1), None),
        (torch.float32, 512, 2048, (4, 4), None),
        (torch.float32, 512, 2048, (8, 2), 400),
        (torch.bfloat16, 512, 2048, (8, 2), None),
    ],
)
def test_torch_blocks_take_what_is_planned(monkeypatch, dtype, tokens, prefix, heads, window):
    for module in (torch_blocks, planned):
        monkeypatch.setattr(module, "SCORES_TILE_BYTES", 1 << 19)
    keys = tokens + prefix
    do, q = (torch.randn(tokens, heads[0], HEAD_SIZE).to(dtype) for _ in range(2))
    k, v = (torch.randn(keys, heads[1], HEAD_SIZE).to(dtype) for _ in range(2))
    attention, call = KERNELS["torch_blocks"], AttentionCall(q, k, v, window=window)
    o, lse = attention.forward(call)
    dk, dv = (torch.zeros(k.shape) for _ in range(2))
    model = ModelConfig(
        vocab_size=64, hidden_size=heads[0] * HEAD_SIZE, num_layers=1, num_heads=heads[0],
        num_kv_heads=heads[1], mlp_size=64, sliding_window=window,
    )  # fmt: skip
    h100 = PRESETS["h100"]
    machine = replace(h100, device=replace(h100.device, attention_backend="torch_blocks"))
    named = "bf16" if dtype is torch.bfloat16 else "fp32"
    sizes = TensorSizes(Workload(model, machine, dtype=named), tokens, prefix)
    forward = peak_bytes(lambda: attention.forward(call))
    assert forward <= 1.02 * max(live for _, live in planned.attention_forward(sizes))
    backward = peak_bytes(lambda: attention.backward(call, do, o, lse, dk_TKD=dk, dv_TKD=dv))
    expected = max(live for _, live in planned.attention_backward(sizes))
    assert backward == pytest.approx(expected, rel=0.03)
