"""Euclidean norm of many tensors as one vector, and their scaling, each in a launch over chunks.

A table, built once per set of tensors, divides the tensors into chunks of memory; a program owns a
chunk. The split of sums depends only on sizes and alignment of the tensors, and no sum uses
atomics: the norm of the same gradients is bitwise reproducible.

Legend: i elements of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sppo.kernels.triton.launch import accumulation_type, on_device_of

_CHUNK = 1 << 16
_BLOCK = 4096
_ROOT_BLOCK = 1024
_VECTOR_BYTES = 16
"""Alignment of the widest load, of which the compiler must be told for addresses from a table."""
_KEPT_TABLES = 8


@triton.jit
def _chunk(table_ptr, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """Return (pointer to the program's chunk, number of elements in the chunk)."""
    row_ptr = table_ptr + 2 * tl.program_id(0).to(tl.int64)
    begin_ptr = tl.load(row_ptr).to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        begin_ptr = tl.multiple_of(begin_ptr, 16)
    return begin_ptr, tl.load(row_ptr + 1).to(tl.int32)


@triton.jit
def _squares_kernel(
    table_ptr,
    sums_ptr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the sum of squares of each chunk: per lane in ELEMENT, over lanes in float64."""
    begin_ptr, count = _chunk(table_ptr, ELEMENT, ALIGNED)
    index_i = tl.arange(0, BLOCK)
    sum_i = tl.zeros([BLOCK], ELEMENT)
    if count == CHUNK:  # unmasked, because masks prevent vectorised loads
        for start in range(0, CHUNK, BLOCK):
            x_i = tl.load(begin_ptr + start + index_i)
            sum_i += x_i * x_i
    else:
        for start in range(0, count, BLOCK):
            x_i = tl.load(begin_ptr + start + index_i, mask=index_i < count - start, other=0.0)
            sum_i += x_i * x_i
    tl.store(sums_ptr + tl.program_id(0), tl.sum(sum_i.to(tl.float64), 0))


@triton.jit(do_not_specialize=["num_sums"])
def _root_kernel(sums_ptr, norm_ptr, num_sums, BLOCK: tl.constexpr):
    """Write the square root of the sum of all chunks' sums; one program."""
    index_i = tl.arange(0, BLOCK)
    total_i = tl.zeros([BLOCK], tl.float64)
    for start in range(0, num_sums, BLOCK):
        inside_i = index_i < num_sums - start
        total_i += tl.load(sums_ptr + start + index_i, mask=inside_i, other=0.0)
    norm = tl.sqrt(tl.sum(total_i, 0))
    tl.store(norm_ptr, norm.to(norm_ptr.dtype.element_ty))


@triton.jit
def _scale_kernel(
    table_ptr,
    factor_ptr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply each chunk by the factor in place; a factor of one accesses no chunk."""
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        begin_ptr, count = _chunk(table_ptr, ELEMENT, ALIGNED)
        index_i = tl.arange(0, BLOCK)
        if count == CHUNK:
            for start in range(0, CHUNK, BLOCK):
                x_at_i = begin_ptr + start + index_i
                tl.store(x_at_i, tl.load(x_at_i) * factor)
        else:
            for start in range(0, count, BLOCK):
                x_at_i = begin_ptr + start + index_i
                inside_i = index_i < count - start
                x_i = tl.load(x_at_i, mask=inside_i, other=0.0)
                tl.store(x_at_i, x_i * factor, mask=inside_i)


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of tensors of one dtype and device as one vector, 0-d."""
    first = tensors[0]
    table, aligned = _table(tensors)
    sums = torch.empty(len(table), dtype=torch.float64, device=first.device)
    norm = torch.empty((), dtype=first.dtype, device=first.device)
    with on_device_of(first):
        _squares_kernel[(len(table),)](
            table,
            sums,
            ELEMENT=accumulation_type(first.dtype),
            ALIGNED=aligned,
            CHUNK=_CHUNK,
            BLOCK=_BLOCK,
            num_warps=8,
        )
        _root_kernel[(1,)](sums, norm, len(sums), BLOCK=_ROOT_BLOCK)
    return norm


def scale_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors by a 0-d ``factor`` in place, all of one dtype and device."""
    first = tensors[0]
    table, aligned = _table(tensors)
    with on_device_of(first):
        _scale_kernel[(len(table),)](
            table,
            factor,
            ELEMENT=accumulation_type(first.dtype),
            ALIGNED=aligned,
            CHUNK=_CHUNK,
            BLOCK=_BLOCK,
            num_warps=8,
        )


def _table(tensors: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """Return (address and elements of each chunk ``[chunks, 2]``, whether all are aligned)."""
    first = tensors[0]
    places = tuple((x.data_ptr(), x.numel()) for x in tensors)
    aligned = all(address % _VECTOR_BYTES == 0 for address, _ in places)
    return _cached_table(places, first.element_size(), first.device), aligned


@lru_cache(maxsize=_KEPT_TABLES)
def _cached_table(
    places: tuple[tuple[int, int], ...], element_bytes: int, device: torch.device
) -> Tensor:
    """Return the chunk table of (address, elements) pairs; cached, as gradients do not move."""
    chunks = []
    for address, elements in places:
        begins = torch.arange(0, elements, _CHUNK)
        counts = (elements - begins).clamp(max=_CHUNK)
        chunks.append(torch.stack([address + element_bytes * begins, counts], 1))
    return torch.cat(chunks).to(device)
