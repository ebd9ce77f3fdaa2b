"""Linear attention of the autograd oracle: the recurrence of a whole sequence, token by token.

Legend: S tokens, E hidden, M channels of the convolution, H value heads, K size of a key, V of a
value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from sppo.config.model import ModelConfig

LEAST_SQUARE = 1e-6
"""Added to the squared lengths by which queries and keys are divided."""


def linear_attention(
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    prefix: str,
    n1_SE: Tensor,
    document_starts: Sequence[int],
) -> Tensor:
    """Output of linear attention, ``[S, E]``; no document sees another one."""
    linear = model.linear_attention
    assert linear is not None
    ends = [*document_starts[1:], len(n1_SE)]
    o = torch.cat(
        [
            document_outputs(model, weights, prefix, n1_SE[start:end])
            for start, end in zip(document_starts, ends, strict=True)
        ]
    )
    wide = o.to(torch.promote_types(o.dtype, torch.float32))
    rms = (wide.square().mean(-1, keepdim=True) + model.norm_eps).sqrt()
    normed = (wide / rms).to(o.dtype) * weights[prefix + "linear_norm.weight"]
    gate = (n1_SE @ weights[prefix + "linear_gate.weight"].T).view_as(o)
    return (normed * functional.silu(gate)).flatten(1) @ weights[prefix + "linear_o.weight"].T


def document_outputs(
    model: ModelConfig, weights: Mapping[str, Tensor], prefix: str, n1_SE: Tensor
) -> Tensor:
    """Outputs of the rule for one document, ``[S, H, V]``."""
    linear = model.linear_attention
    assert linear is not None
    sizes = {"q": linear.key_size, "k": linear.key_size, "v": linear.value_size}
    q, k, v = (
        _convolved(
            n1_SE @ weights[f"{prefix}linear_{name}.weight"].T,
            weights[f"{prefix}conv_{name}.weight"],
        ).unflatten(1, (-1, size))
        for name, size in sizes.items()
    )
    q, k = (x / (x.square().sum(-1, keepdim=True) + LEAST_SQUARE).sqrt() for x in (q, k))
    a, b = (n1_SE @ weights[f"{prefix}linear_{name}.weight"].T for name in ("decay", "beta"))
    rate, bias = weights[prefix + "decay.log_rate"].exp(), weights[prefix + "decay.bias"]
    decay, beta = (-rate * functional.softplus(a + bias)).exp(), b.sigmoid()
    key_head = torch.arange(linear.value_heads) * linear.key_heads // linear.value_heads
    q, k = q[:, key_head] * linear.key_size**-0.5, k[:, key_head]
    state = q.new_zeros(linear.value_heads, linear.key_size, linear.value_size)
    outputs = []
    for t in range(len(n1_SE)):
        state = state * decay[t, :, None, None]
        found = torch.einsum("hkv,hk->hv", state, k[t])
        added = beta[t, :, None] * (v[t] - found)
        state = state + torch.einsum("hk,hv->hkv", k[t], added)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outputs)


def _convolved(x_SM: Tensor, weight_MW: Tensor) -> Tensor:
    """Causal convolution of every channel, ``[S, M]``, and its activation."""
    before = weight_MW.shape[1] - 1
    padded = functional.pad(x_SM.T[None], (before, 0))
    return functional.silu(functional.conv1d(padded, weight_MW[:, None], groups=len(weight_MW)))[
        0
    ].T
