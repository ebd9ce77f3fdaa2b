"""RMSNorm and LayerNorm over rows, forward and backward in one pass, fused with residual additions.

A program owns some rows; in backward it also sums the rows' terms of the parameters' gradients, and
torch adds these partial sums of the programs, always in the same order.

Legend: R rows, E columns, r rows of a tile, P programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sppo.kernels.norm_parameters import NormParameters
from sppo.kernels.triton.launch import accumulation_type, on_device_of, row_major

_FORWARD_TILE = {"elements": 4096, "elements_per_warp": 1024}
_BACKWARD_TILE = {"elements": 2048, "elements_per_warp": 512}
"""Tile size of backward: smaller, because backward keeps four times as many values of a row as
forward does."""
_BACKWARD_WARPS = 4096
"""Most warps of all programs together: 512 programs of eight warps with a row of 4096 each. The
number does not depend on the device, so that sums are split alike everywhere. Up to three rows of
4096 fit the registers of a multiprocessor, and a GPU has up to 160 multiprocessors."""
_LEAST_BACKWARD_PROGRAMS = 512
"""Programs for larger rows, of which a single row fills a multiprocessor."""


@triton.jit
def _offsets(row_r, row_stride, column_E):
    return row_r.to(tl.int64)[:, None] * row_stride + column_E[None, :]


@triton.jit
def _statistics(x_rE, inside_rE, size, EPS: tl.constexpr, CENTRED: tl.constexpr):
    """Return (x, less its mean if ``CENTRED``; one over the root mean square of the returned x)."""
    if CENTRED:
        mean_r = tl.sum(x_rE, 1) / size
        x_rE = tl.where(inside_rE, x_rE - mean_r[:, None], 0.0)
    inverse_r = 1.0 / tl.sqrt(tl.sum(x_rE * x_rE, 1) / size + EPS)
    return x_rE, inverse_r


@triton.jit
def _factors(weight_ptr, column_E, size, OFFSET: tl.constexpr, ACC_DTYPE: tl.constexpr):
    """Return the weight, or 1 + weight if it is an ``OFFSET`` from one."""
    weight_E = tl.load(weight_ptr + column_E, mask=column_E < size, other=0.0).to(ACC_DTYPE)
    if OFFSET:
        weight_E += 1.0
    return weight_E


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x_ptr,
    added_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    size,
    x_stride,
    added_stride,
    y_stride,
    EPS: tl.constexpr,
    CENTRED: tl.constexpr,
    OFFSET: tl.constexpr,
    ADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    row_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column_E = tl.arange(0, BLOCK)
    inside_rE = (row_r[:, None] < num_rows) & (column_E[None, :] < size)
    x_at_rE = x_ptr + _offsets(row_r, x_stride, column_E)
    x_rE = tl.load(x_at_rE, mask=inside_rE, other=0.0).to(ACC_DTYPE)
    if ADDED:
        added_at_rE = added_ptr + _offsets(row_r, added_stride, column_E)
        x_rE += tl.load(added_at_rE, mask=inside_rE, other=0.0).to(ACC_DTYPE)
        rounded_rE = x_rE.to(x_ptr.dtype.element_ty)
        tl.store(x_at_rE, rounded_rE, mask=inside_rE)
        x_rE = rounded_rE.to(ACC_DTYPE)
    x_rE, inverse_r = _statistics(x_rE, inside_rE, size, EPS, CENTRED)
    weight_E = _factors(weight_ptr, column_E, size, OFFSET, ACC_DTYPE)
    y_rE = x_rE * inverse_r[:, None] * weight_E[None, :]
    if CENTRED:
        bias_E = tl.load(bias_ptr + column_E, mask=column_E < size, other=0.0).to(ACC_DTYPE)
        y_rE += bias_E[None, :]
    y_rE = y_rE.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + _offsets(row_r, y_stride, column_E), y_rE, mask=inside_rE)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    dresidual_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    num_rows,
    size,
    dy_stride,
    x_stride,
    dresidual_stride,
    dx_stride,
    EPS: tl.constexpr,
    CENTRED: tl.constexpr,
    OFFSET: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PARAMETERS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    column_E = tl.arange(0, BLOCK)
    dweight_E = tl.zeros([BLOCK], ACC_DTYPE)
    dbias_E = tl.zeros([BLOCK], ACC_DTYPE)
    step = tl.num_programs(0) * ROWS
    for row in range(tl.program_id(0) * ROWS, num_rows, step):
        row_r = row + tl.arange(0, ROWS)
        inside_rE = (row_r[:, None] < num_rows) & (column_E[None, :] < size)
        x_rE = tl.load(x_ptr + _offsets(row_r, x_stride, column_E), mask=inside_rE, other=0.0)
        dy_rE = tl.load(dy_ptr + _offsets(row_r, dy_stride, column_E), mask=inside_rE, other=0.0)
        x_rE, inverse_r = _statistics(x_rE.to(ACC_DTYPE), inside_rE, size, EPS, CENTRED)
        dy_rE = dy_rE.to(ACC_DTYPE)
        normed_rE = x_rE * inverse_r[:, None]
        if PARAMETERS:
            dweight_E += tl.sum(dy_rE * normed_rE, 0)
        # Loaded again for every row, from a cache: keeping it would take a fifth of the registers.
        weight_E = _factors(weight_ptr, column_E, size, OFFSET, ACC_DTYPE)
        inner_rE = dy_rE * weight_E[None, :]
        dx_rE = inner_rE - normed_rE * (tl.sum(inner_rE * normed_rE, 1) / size)[:, None]
        if CENTRED:
            if PARAMETERS:
                dbias_E += tl.sum(dy_rE, 0)
            dx_rE -= (tl.sum(inner_rE, 1) / size)[:, None]
        dx_rE *= inverse_r[:, None]
        if RESIDUAL:
            dresidual_at_rE = dresidual_ptr + _offsets(row_r, dresidual_stride, column_E)
            dx_rE += tl.load(dresidual_at_rE, mask=inside_rE, other=0.0).to(ACC_DTYPE)
        dx_rE = dx_rE.to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + _offsets(row_r, dx_stride, column_E), dx_rE, mask=inside_rE)
    if PARAMETERS:
        partial_E = tl.program_id(0) * size + column_E
        tl.store(dweight_ptr + partial_E, dweight_E, mask=column_E < size)
        if CENTRED:
            tl.store(dbias_ptr + partial_E, dbias_E, mask=column_E < size)


def norm(x_CE: Tensor, parameters: NormParameters) -> Tensor:
    """Return the RMSNorm of rows ``[C, E]``, or with a bias the LayerNorm, rounded at the end."""
    return _norm(_rows(x_CE), None, parameters).view(x_CE.shape)


def add_norm_(total_CE: Tensor, x_CE: Tensor, parameters: NormParameters) -> Tensor:
    """Add ``x`` to the contiguous ``total`` in place; return the norm of the rounded sum."""
    assert total_CE.is_contiguous(), "what is written in place cannot be copied first"
    total_RE = total_CE.view(-1, total_CE.shape[-1])
    return _norm(total_RE, _rows(x_CE), parameters).view(total_CE.shape)


def _norm(x_RE: Tensor, added_RE: Tensor | None, parameters: NormParameters) -> Tensor:
    """Return the norm of ``x_RE``, after adding ``added_RE`` to ``x_RE`` in place unless None."""
    y_RE = torch.empty(x_RE.shape, dtype=x_RE.dtype, device=x_RE.device)
    num_rows, size = x_RE.shape
    cut = _cut(size, **_FORWARD_TILE)
    with on_device_of(x_RE):
        _norm_kernel[(triton.cdiv(num_rows, cut["ROWS"]),)](
            x_RE,
            added_RE,
            parameters.weight_E,
            parameters.bias_E,
            y_RE,
            num_rows,
            size,
            x_RE.stride(0),
            0 if added_RE is None else added_RE.stride(0),
            size,
            EPS=parameters.eps,
            CENTRED=parameters.bias_E is not None,
            OFFSET=parameters.offset,
            ADDED=added_RE is not None,
            ACC_DTYPE=accumulation_type(x_RE.dtype),
            **cut,
        )
    return y_RE


def norm_backward(
    dy_CE: Tensor,
    x_CE: Tensor,
    parameters: NormParameters,
    *,
    dresidual_CE: Tensor | None = None,
    with_parameters: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients (dx_CE plus ``dresidual_CE``, dweight_E or None, dbias_E or None)."""
    dy_RE, x_RE, centred = _rows(dy_CE), _rows(x_CE), parameters.bias_E is not None
    dresidual_RE = None if dresidual_CE is None else _rows(dresidual_CE)
    num_rows, size = x_RE.shape
    cut = _cut(size, **_BACKWARD_TILE)
    most_programs = max(_LEAST_BACKWARD_PROGRAMS, _BACKWARD_WARPS // cut["num_warps"])
    programs = min(most_programs, triton.cdiv(num_rows, cut["ROWS"]))
    dx_RE = torch.empty(x_RE.shape, dtype=x_RE.dtype, device=x_RE.device)
    acc_dtype = torch.promote_types(x_RE.dtype, torch.float32)
    num_sums = (1 + centred) if with_parameters else 0
    partial = torch.empty((num_sums, programs, size), dtype=acc_dtype, device=x_RE.device)
    with on_device_of(x_RE):
        _norm_backward_kernel[(programs,)](
            dy_RE,
            x_RE,
            parameters.weight_E,
            dresidual_RE,
            dx_RE,
            *(*partial, None, None)[:2],
            num_rows,
            size,
            dy_RE.stride(0),
            x_RE.stride(0),
            0 if dresidual_RE is None else dresidual_RE.stride(0),
            size,
            EPS=parameters.eps,
            CENTRED=centred,
            OFFSET=parameters.offset,
            RESIDUAL=dresidual_RE is not None,
            PARAMETERS=with_parameters,
            ACC_DTYPE=accumulation_type(x_RE.dtype),
            **cut,
        )
    dweight_E, dbias_E = (*partial.sum(1), None, None)[:2]
    return dx_RE.view(x_CE.shape), dweight_E, dbias_E


def _rows(x_CE: Tensor) -> Tensor:
    """Return ``x_CE`` as ``[R, E]`` with contiguous rows; a view if possible, else a copy."""
    return row_major(x_CE.reshape(-1, x_CE.shape[-1]))


def _cut(size: int, *, elements: int, elements_per_warp: int) -> dict[str, Any]:
    """Return the tile sizes: one whole row or several short rows, and 4 to 16 warps."""
    block = triton.next_power_of_2(size)
    rows = max(1, elements // block)
    warps = min(16, max(4, rows * block // elements_per_warp))
    return {"ROWS": rows, "BLOCK": block, "num_warps": warps}
