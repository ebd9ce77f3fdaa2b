"""Keys of more elements than 32 bits can count, on a GPU: fast back ends against torch_blocks."""

import pytest
import torch

from sppo.kernels.attention import rectangle_attention
from sppo.kernels.attention.call import AttentionCall
from sppo.kernels.attention.choice import KERNELS
from tests.kernels.places import CUDA_BACKENDS, NO_GPU, need_backend

pytestmark = [pytest.mark.gpu, NO_GPU]
QUERIES, HEADS, KV_HEADS, SIZE = 256, 32, 8, 128
ELEMENTS_OF_32_BITS = 1 << 31
ROUNDOFF = 2.0**-8
FAST = [name for name in CUDA_BACKENDS if name != "torch_blocks"]


def attend(backend, do, q, k, v):
    """(o, lse, dq, dk of the first keys, dk of the last keys)."""
    call = AttentionCall(q, k, v)
    o, lse = KERNELS[backend].forward(call)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    dq = KERNELS[backend].backward(call, do, o, lse, dk_TKD=dk, dv_TKD=dv)
    return o, lse, dq, dk[:QUERIES].clone(), dk[-QUERIES:].clone()


@pytest.mark.parametrize(
    "whole",
    [
        pytest.param(False, id="in parts"),
        # What the package itself can do; parts are there because some cannot.
        pytest.param(True, id="at once", marks=pytest.mark.xfail(strict=False)),
    ],
)
@pytest.mark.parametrize("beyond", [-QUERIES, QUERIES], ids=["below", "above"])
@pytest.mark.parametrize("backend", FAST)
def test_no_key_is_lost(backend, beyond, whole, monkeypatch):
    options = {"dtype": torch.bfloat16, "head_size": SIZE, "group": HEADS // KV_HEADS}
    need_backend(backend, "cuda", **options)
    if whole:
        monkeypatch.setattr(rectangle_attention, "MAX_FORWARD_ELEMENTS", 1 << 62)
    keys = ELEMENTS_OF_32_BITS // (KV_HEADS * SIZE) + beyond
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(QUERIES, HEADS, SIZE)] * 2 + [(keys, KV_HEADS, SIZE)] * 2
    operands = [
        torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)
        for shape in shapes
    ]
    operands[1].mul_(4)  # a peaked softmax: every key counts
    expected = attend("torch_blocks", *operands)
    for ours, theirs in zip(attend(backend, *operands), expected, strict=True):
        error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert error <= 8 * ROUNDOFF
