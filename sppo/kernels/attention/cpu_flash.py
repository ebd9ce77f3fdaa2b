"""torch's CPU flash attention as a block kernel, with lse and a backward.

torch splits the backward over (batch, head) pairs only, so a rectangle with fewer key/value heads
than threads would leave cores idle. For such a rectangle the keys are cut into parts that form a
batch: with the global lse each part's gradients are exact, dk and dv are those of the parts, and dq
is the sum over the parts.

torch multiplies matrices in half precision by oneDNN, which compiles code for every shape, two
thirds of a MiB each, of which at most a third is freed whatever ONEDNN_PRIMITIVE_CACHE_CAPACITY is.
Documents have thousands of lengths. Blocks of a backward whose rows or keys are not multiples of
:data:`HALF_TOKENS` are therefore computed in fp32, whose kernels support all shapes. On a
CPU without products in half precision, every block of a backward is computed in fp32: measured with
torch 2.13 on an AMD EPYC without AVX-512, backward takes 4 to 7 times as long in bf16 as in fp32
with the casts of its operands. Forward takes the same time in both, and stays in bf16.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sppo.cost.tiles import HALF_TOKENS, LEAST_PART_KEYS
from sppo.kernels.attention.block_attention import BlockCall
from sppo.kernels.half_products import cpu_multiplies
from sppo.kernels.row_tiles import row_tiles

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_HALF = (torch.bfloat16, torch.float16)


def backward_multiple(dtype: torch.dtype) -> int | None:
    """Return HALF_TOKENS if backward multiplies in half precision, else None."""
    return HALF_TOKENS if dtype in _HALF and cpu_multiplies(dtype) else None


class CpuFlash:
    """Block kernel over ``aten::_scaled_dot_product_flash_attention_for_cpu``."""

    def forward(self, call: BlockCall) -> tuple[Tensor, Tensor]:
        """Return (o, lse) of one block by torch's CPU flash attention."""
        o, lse = _FORWARD(
            call.q, call.k, call.v, 0.0, call.causal, attn_mask=call.mask, scale=call.scale
        )
        return o, lse

    def backward(
        self, call: BlockCall, do: Tensor, o: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of one block by torch's CPU flash attention.

        In half precision, blocks whose rows or keys are not multiples of HALF_TOKENS
        are computed and returned in fp32, as are all blocks on a CPU without products in half
        precision; dq of a backward in parts of keys is fp32 or better.
        """
        q, k, v, mask = call.q, call.k, call.v, call.mask
        multiple = backward_multiple(q.dtype)  # of tokens, for products in half precision
        is_whole = multiple is not None and not (q.shape[2] % multiple or k.shape[2] % multiple)
        if q.dtype in _HALF and not is_whole:
            do, q, k, v, o = (_cast(x) for x in (do, q, k, v, o))
            mask = None if mask is None else _cast(mask)
        parts = 1 if call.causal or mask is not None else _key_parts(q, k)
        if parts == 1:
            dq, dk, dv = _BACKWARD(
                do, q, k, v, o, lse, 0.0, call.causal, attn_mask=mask, scale=call.scale
            )
            return dq, dk, dv
        return _backward_in_parts(do, q, k, v, o, lse, scale=call.scale, parts=parts)


def _cast(x: Tensor) -> Tensor:
    """Return ``x`` in fp32; heads expanded by a stride of zero are cast once and expanded."""
    if x.dim() == 4 and x.stride(1) == 0:
        return x[:, :1].float().expand_as(x)
    return x.float()


def _key_parts(q: Tensor, k: Tensor) -> int:
    """Return the number of parts of the keys that balances (part, head) pairs over the threads."""
    if q.shape[0] != 1:
        return 1
    heads, threads = q.shape[1], torch.get_num_threads()
    wanted = threads // math.gcd(heads, threads)
    return max(1, min(wanted, k.shape[2] // LEAST_PART_KEYS))


def _backward_in_parts(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, scale: float, parts: int
) -> tuple[Tensor, Tensor, Tensor]:
    unit = HALF_TOKENS if k.dtype in _HALF else 1
    size = k.shape[2] // parts // unit * unit
    even = size * parts
    rows = (x.expand(parts, *x.shape[1:]) for x in (do, q, o, lse))
    do_p, q_p, o_p, lse_p = rows
    k_p, v_p = (_parted(x[:, :, :even], parts) for x in (k, v))
    dq_p, dk_p, dv_p = _BACKWARD(do_p, q_p, k_p, v_p, o_p, lse_p, 0.0, False, scale=scale)
    dq = _sum(dq_p, dtype=lse.dtype)
    key_gradients = [[*x.unbind(0)] for x in (dk_p, dv_p)]
    if even < k.shape[2]:
        dq_r, *rest = _BACKWARD(
            do, q, k[:, :, even:], v[:, :, even:], o, lse, 0.0, False, scale=scale
        )
        dq.add_(dq_r)
        del dq_r
        for parts_of, last in zip(key_gradients, rest, strict=True):
            parts_of.append(last[0])
    dk, dv = (torch.cat(parts_of, dim=1).unsqueeze(0) for parts_of in key_gradients)
    return dq, dk, dv


def _sum(x: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return ``[parts, K, r, D]`` summed to ``[1, K, r, D]``; torch.sum would cast all of ``x``."""
    total = x[:1].to(dtype)
    for part in x[1:]:
        for of_head, part_of_head in zip(total[0], part, strict=True):
            for rows in row_tiles(of_head):
                of_head[rows].add_(part_of_head[rows])
    return total


def _parted(x: Tensor, parts: int) -> Tensor:
    """Return ``[1, K, t, D]`` as ``[parts, K, t/parts, D]`` without a copy."""
    heads, tokens, size = x.shape[1:]
    return x[0].view(heads, parts, tokens // parts, size).transpose(0, 1)
