"""Gated delta rule (arXiv:2412.06464), from a state to a state, and the choice of its back end.

Each value head has a matrix S, the state. Every token lets it decay, adds what v differs from what
S has at k, and reads it; consecutive value heads share q and k::

    S <- exp(g) S        S <- S + k (beta (v - S' k))'        o = S' q

torch computes it everywhere. On a GPU the package fla-core computes it for tensors in half
precision, if it is right on a small case, unless torch is asked to be deterministic: each process
measures which of its kernels are fast, and another choice rounds otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import metadata

import torch
from torch import Tensor
from torch.nn import functional
from torch.torch_version import TorchVersion

from sppo.kernels.chunked_rule import RuleOperands, chunked_rule, chunked_state

_log = logging.getLogger(__name__)
_LEAST_FLA = "0.6"
"""First version that is right, or says so, where earlier ones had wrong gradients: on Hopper GPUs
with triton 3.4 to 3.7.0, on Blackwell GPUs (issues 640, 913, 945, 999 of its repository)."""
_HOPPER = 9
"""Major compute capability of Hopper GPUs."""
_WRONG_ON_HOPPER = ("3.4", "3.7.1")
"""Versions of triton, the last one left out, with which it has no right gradients on Hopper GPUs
in its own kernels. It says so only behind a compilation of minutes."""
_MOST_ERROR = 0.05
"""Relative error of a small case; roundings to bf16 cost less than 0.01."""


def delta_rule(x: RuleOperands) -> tuple[Tensor, Tensor]:
    """Return the outputs ``[C, H, V]``, in v's dtype, and the state after the last token.

    Autograd differentiates both.
    """
    return _fla_rule(x) if _fla_serves(x) else chunked_rule(x)


def state_after(x: RuleOperands) -> Tensor:
    """Return the state after the last token, without the outputs."""
    return _fla_rule(x)[1] if _fla_serves(x) else chunked_state(x)


def _fla_serves(x: RuleOperands) -> bool:
    """Return whether fla-core computes the rule for such operands."""
    v = x.v_CHV
    return (
        v.device.type == "cuda"
        and v.dtype in (torch.bfloat16, torch.float16)
        and not torch.are_deterministic_algorithms_enabled()
        and _fla_works(v.device, v.dtype, *x.state_HKV.shape[1:])
    )


@lru_cache(maxsize=16)
def _fla_works(device: torch.device, dtype: torch.dtype, key_size: int, value_size: int) -> bool:
    """Return whether fla-core is right on a small case; if not, say why once."""
    reason = _why_not_fla(device, dtype, key_size, value_size)
    if reason is not None:
        _log.warning("linear attention runs as torch operations on %s: fla-core %s", device, reason)
    return reason is None


def _why_not_fla(
    device: torch.device, dtype: torch.dtype, key_size: int, value_size: int
) -> str | None:
    """Return why fla-core cannot be used, as the end of a sentence; None if it can."""
    try:
        version = metadata.version("fla-core")
    except metadata.PackageNotFoundError:
        return "is not installed (pip install 'sppo[fla]')"
    if TorchVersion(version) < _LEAST_FLA:
        return f"{version} has known wrong gradients: install {_LEAST_FLA} or later"
    first, right = _WRONG_ON_HOPPER
    if _is_hopper(device) and first <= TorchVersion(metadata.version("triton")) < right:
        return f"has no right gradients on Hopper GPUs with this triton: install {right} or later"
    try:
        error = _error_on_a_small_case(device, dtype, key_size, value_size)
    except Exception as failure:  # third-party packages may raise anything
        first_line = (str(failure).splitlines() or [""])[0]
        return f"{version} fails on a small case with {type(failure).__name__}: {first_line}"
    return None if error <= _MOST_ERROR else f"{version} is wrong on a small case: {error:.1e}"


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _HOPPER


def _error_on_a_small_case(
    device: torch.device, dtype: torch.dtype, key_size: int, value_size: int
) -> float:
    """Return the largest relative error of outputs, state and gradients of two documents."""
    random, tokens, heads = torch.Generator().manual_seed(0), 150, 2

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    q, k = (functional.normalize(drawn(tokens, 1, key_size), dim=-1) for _ in range(2))
    v, do = (drawn(tokens, heads, value_size).to(device, dtype) for _ in range(2))
    g, beta = -drawn(tokens, heads).square(), drawn(tokens, heads).sigmoid()
    state, dstate = (drawn(heads, key_size, value_size).to(device) for _ in range(2))
    operands = q.to(device, dtype), k.to(device, dtype), v, g.to(device), beta.to(device), state
    ours = _results(_fla_rule, operands, (do, dstate))
    exact = [[x.cpu().double() for x in some] for some in (operands, (do, dstate))]
    pairs = zip(ours, _results(chunked_rule, *exact), strict=True)
    errors = torch.stack([(a.cpu().double() - b).norm() / b.norm() for a, b in pairs])
    return float(errors.max())  # NaN if one is


def _results(
    rule: Callable[[RuleOperands], tuple[Tensor, Tensor]],
    operands: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> list[Tensor]:
    """Return the outputs, the state and the gradients of all operands."""
    leaves = [x.detach().clone().requires_grad_() for x in operands]
    q, k, v, g, beta, state = leaves
    with torch.enable_grad():
        found = rule(RuleOperands(q, k, v, g, beta, state, starts=(70,)))
    return [x.detach() for x in (*found, *torch.autograd.grad(found, leaves, gradients))]


def _fla_rule(x: RuleOperands) -> tuple[Tensor, Tensor]:
    """Compute :func:`delta_rule` by fla-core, for which documents are sequences."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    device = x.v_CHV.device
    positions = [0, *(start for start in x.starts if start), len(x.v_CHV)]
    edges = torch.tensor(positions, pin_memory=device.type == "cuda")
    others = len(edges) - 2
    first_1HKV = x.state_HKV.unsqueeze(0) * float(0 not in x.starts)
    o_1CHV, states = chunk_gated_delta_rule(
        *(operand.unsqueeze(0) for operand in x[:5]),
        scale=1.0,
        initial_state=functional.pad(first_1HKV, (0, 0, 0, 0, 0, 0, 0, others)),
        output_final_state=True,
        cu_seqlens=edges.to(device, non_blocking=True) if others else None,
        cu_seqlens_cpu=edges if others else None,
    )
    return o_1CHV[0], states[-1].clone()
