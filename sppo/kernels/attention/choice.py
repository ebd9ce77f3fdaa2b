"""Choice of an attention back end: a table of capabilities, and the rule of the choice.

The first back end of the table that supports the case is taken; on Hopper cuDNN is preferred to
flash-attn 2 (:data:`_BEFORE_ON_HOPPER`). On a GPU the back end must also compute a small problem of
the same kind correctly, forward and backward: packages change their interfaces and some builds lack
features, and such a failure should occur before the first step, not in it. The choice is logged
once per case, with the rejected back ends and the reasons, as a debug message if there are none.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from sppo.kernels.attention.block_attention import BlockAttention
from sppo.kernels.attention.call import AttentionCall
from sppo.kernels.attention.cpu_flash import CpuFlash, backward_multiple
from sppo.kernels.attention.cudnn_blocks import CudnnBlocks
from sppo.kernels.attention.flash_packages import (
    FLASH_ATTN_2,
    FLASH_ATTN_3,
    FLASH_ATTN_4,
    TorchFlash,
)
from sppo.kernels.attention.rectangle_attention import RectangleAttention
from sppo.kernels.attention.torch_blocks import TorchBlocks

BackendName = Literal[
    "cpu_flash",
    "flash_attn_3",
    "flash_attn_4",
    "flash_attn_2",
    "torch_flash",
    "cudnn",
    "torch_blocks",
]

_log = logging.getLogger(__name__)
_HALF = (torch.bfloat16, torch.float16)
_SINGLE = (*_HALF, torch.float32)
_ALL = (*_SINGLE, torch.float64)
_MAJORS = (8, 9, 10, 11, 12)
_MAX_ROUNDOFFS = {torch.bfloat16: 8, torch.float16: 8, torch.float32: 128, torch.float64: 128}
"""Largest accepted errors of the small case in units of roundoff, in relative Frobenius norm.
Rounding of the operands dominates in half precision (good kernels measure up to 2.2), rounding of
the sums in single precision."""
_TOKEN_FACTOR = 4
"""Accepted error of a single token over that of all: one wrong token of many hides in their norm.
Tokens of a small result are compared with 1 / _TOKEN_FACTOR of a typical one."""
_SMALL_QUERIES, _SMALL_KEYS, _SMALL_KV_HEADS, _SMALL_PART, _SMALL_WINDOW = 300, 700, 2, 384, 150
"""Several tiles of queries and of keys for every kernel, the last ones partly filled."""
_DOCUMENTS = ((0,), (0, 100, 550))
"""Document starts that the small case is run with: one document, and three documents."""


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Properties of an attention call that decide which back ends support it."""

    device: torch.device
    dtype: torch.dtype
    head_size: int
    group: int
    """Query heads per key/value head."""
    window: bool
    single_tokens: bool = False
    """True if blocks of one query or one key may occur, e.g. because a document begins or ends next
    to a cut."""

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        window = ", sliding window" if self.window else ""
        single = ", blocks of one token" if self.single_tokens else ""
        return f"{self.device.type} ({dtype}, head size {self.head_size}{window}{single})"


@dataclass(frozen=True, slots=True)
class Capability:
    """Cases that a back end supports; every back end supports grouped queries."""

    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    module: str | None = None
    """Module that must be installed; None if there is none."""
    max_head_size: int | None = None
    head_size_multiple: int = 1
    window: bool = True
    single_tokens: bool = True
    compute_majors: tuple[int, ...] | None = None
    """Major numbers of the compute capabilities that the back end is built for; None for all."""


CAPABILITIES: Mapping[BackendName, Capability] = {
    "cpu_flash": Capability(("cpu",), _ALL),
    "flash_attn_3": Capability(
        ("cuda",), _HALF, "flash_attn_interface", 256, 8, compute_majors=(9,)
    ),
    "flash_attn_4": Capability(
        ("cuda",), _HALF, "flash_attn.cute", 128, 8, compute_majors=(9, 10, 11)
    ),
    "flash_attn_2": Capability(
        ("cuda",), _HALF, "flash_attn_2_cuda", 256, 8, compute_majors=_MAJORS
    ),
    "torch_flash": Capability(("cuda",), _HALF, None, 256, 8, compute_majors=_MAJORS),
    # cuDNN refuses one query or one key, and plans each new block shape for tens of milliseconds.
    "cudnn": Capability(
        ("cuda",), _HALF, None, 128, 8, window=False, single_tokens=False, compute_majors=_MAJORS
    ),
    "torch_blocks": Capability(("cpu", "cuda"), _ALL),
}
"""Capabilities of all back ends, in the order of preference on devices except Hopper."""


AttentionKernel = BlockAttention | RectangleAttention
"""Back end of attention."""
KERNELS: Mapping[BackendName, AttentionKernel] = {
    "cpu_flash": BlockAttention(CpuFlash(), backward_multiple),
    "flash_attn_3": RectangleAttention(FLASH_ATTN_3),
    "flash_attn_4": RectangleAttention(FLASH_ATTN_4),
    "flash_attn_2": RectangleAttention(FLASH_ATTN_2),
    "torch_flash": RectangleAttention(TorchFlash()),
    "cudnn": BlockAttention(CudnnBlocks()),
    "torch_blocks": BlockAttention(TorchBlocks()),
}
"""All back ends, which import their packages when they are first called."""

_HOPPER = 9
_BEFORE_ON_HOPPER: tuple[BackendName, BackendName] = ("cudnn", "flash_attn_2")
"""(A, B): back end A is preferred to B on Hopper. In training cuDNN is 1.7 to 2.3 times faster than
torch's flash-attn 2 on Hopper, but slower on Ampere and Blackwell workstations (transformers, pull
request 48163)."""


@lru_cache(maxsize=64)
def chosen_name(case: AttentionCase) -> BackendName:
    """Return the name of the first back end, in order of preference, that computes ``case`` here.

    Raises:
        ValueError: There is none.
    """
    passed_over: list[str] = []
    for name in preference(case.device):
        reason = why_not_here(name, case)
        if reason is None:
            others = "".join(f"; {text}" for text in passed_over)
            _log.log(
                logging.INFO if passed_over else logging.DEBUG,
                "attention back end on %s: %s (torch %s)%s", case, name, torch.__version__, others,
            )  # fmt: skip
            return name
        if case.device.type in CAPABILITIES[name].devices:
            passed_over.append(f"{name} {reason}")
    raise ValueError(f"no attention back end for {case}: {'; '.join(passed_over)}")


def preference(device: torch.device) -> tuple[BackendName, ...]:
    """Return the names of all back ends in the order in which they are tried on ``device``."""
    names = list(CAPABILITIES)
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _HOPPER:
        first, second = _BEFORE_ON_HOPPER
        names.remove(first)
        names.insert(names.index(second), first)
    return tuple(names)


def why_not(name: BackendName, case: AttentionCase) -> str | None:
    """Return why a back end does not support a case, as the end of a sentence; None if it does."""
    able = CAPABILITIES[name]
    if case.device.type not in able.devices:
        return f"runs on {' and '.join(able.devices)}, tensors are on {case.device.type}"
    if case.dtype not in able.dtypes:
        return f"does not take {str(case.dtype).removeprefix('torch.')}"
    if able.max_head_size is not None and case.head_size > able.max_head_size:
        return f"takes heads of up to {able.max_head_size}, not {case.head_size}"
    if case.head_size % able.head_size_multiple:
        return f"takes head sizes divisible by {able.head_size_multiple}, not {case.head_size}"
    if case.window and not able.window:
        return "has no sliding window"
    if case.single_tokens and not able.single_tokens:
        return "takes no blocks of one token, which documents make"
    if able.module is not None and not is_installed(able.module):
        return f"needs {able.module}, which is not installed"
    if case.device.type == "cuda" and able.compute_majors is not None:
        major, minor = torch.cuda.get_device_capability(case.device)
        if major not in able.compute_majors:
            return f"is not for compute capability {major}.{minor}"
    return None


def why_not_here(name: BackendName, case: AttentionCase) -> str | None:
    """Return why a back end cannot compute a case on this machine; None if it can.

    On a GPU it computes a small case. The reason is the end of a sentence.
    """
    reason = why_not(name, case)
    if reason is None and case.device.type == "cuda":
        reason = error_on_a_small_case(name, case)
    return reason


@lru_cache(maxsize=16)
def is_installed(module: str) -> bool:
    """Return whether ``module`` can be found, without importing it; its parents are imported."""
    try:
        return find_spec(module) is not None
    except Exception:  # raised by the import of a broken parent package
        return False


@torch.no_grad()
def error_on_a_small_case(name: BackendName, case: AttentionCase) -> str | None:
    """Run a back end on a small problem like ``case``; compare it with ``torch_blocks`` in float64.

    Returns:
        The exception or the excessive error as the end of a sentence; None if results are right.
    """
    random = torch.Generator().manual_seed(0)
    heads = _SMALL_KV_HEADS * case.group
    do, q = (_random(random, _SMALL_QUERIES, heads, case) for _ in range(2))
    k, v = (_random(random, _SMALL_KEYS, _SMALL_KV_HEADS, case) for _ in range(2))
    window = _SMALL_WINDOW if case.window else None
    kernel = KERNELS[name]
    if isinstance(kernel, RectangleAttention):
        kernel = replace(kernel, max_backward_keys=_SMALL_PART, max_forward_keys=_SMALL_PART)
    for documents in _DOCUMENTS if CAPABILITIES[name].single_tokens else _DOCUMENTS[:1]:
        call = AttentionCall(q, k, v, window=window, document_starts=documents)
        try:
            ours = _forward_and_backward(kernel, call, do)
        except Exception as error:  # third-party packages may raise anything
            first_line = (str(error).splitlines() or [""])[0]
            return f"fails on a small case with {type(error).__name__}: {first_line}"
        q64, k64, v64, do64 = (x.cpu().double() for x in (q, k, v, do))
        call = replace(call, q_CND=q64, k_TKD=k64, v_TKD=v64)
        exact = _forward_and_backward(KERNELS["torch_blocks"], call, do64)
        bound = _MAX_ROUNDOFFS[case.dtype] * torch.finfo(case.dtype).eps / 2
        for what, value in exact.items():
            error_of = _relative_error(ours[what].cpu().double(), value)
            if not error_of <= bound:
                how = f" with {len(documents)} documents" if len(documents) > 1 else ""
                return f"is wrong on a small case: relative error {error_of:.1e} of {what}{how}"
    return None


def _relative_error(ours: Tensor, exact: Tensor) -> float:
    """Return the error of all tokens, or that of the worst one over _TOKEN_FACTOR if larger."""
    other_dims = 0 if exact.dim() == 2 else (1, 2)  # lse_NC, and tensors with tokens first
    errors, norms = ((x.square().sum(other_dims)).sqrt() for x in (ours - exact, exact))
    typical = norms.square().mean().sqrt()
    of_tokens = errors / norms.clamp_min(typical / _TOKEN_FACTOR)
    return max(float(errors.norm() / norms.norm()), float(of_tokens.max()) / _TOKEN_FACTOR)


def _random(generator: torch.Generator, tokens: int, heads: int, case: AttentionCase) -> Tensor:
    x = torch.randn(tokens, heads, case.head_size, generator=generator)
    return x.to(case.device, case.dtype)


def _forward_and_backward(
    kernel: AttentionKernel, call: AttentionCall, do: Tensor
) -> dict[str, Tensor]:
    """Return outputs and gradients by name."""
    o, lse = kernel.forward(call)
    acc_dtype = torch.promote_types(do.dtype, torch.float32)
    dk, dv = (torch.zeros_like(x, dtype=acc_dtype) for x in (call.k_TKD, call.v_TKD))
    dq = kernel.backward(call, do, o, lse, dk_TKD=dk, dv_TKD=dv)
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
