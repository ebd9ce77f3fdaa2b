"""Values of parameters taken from stored tensors, and stored tensors made of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from sppo.model.huggingface.stored_tensors import HfPart, HfTensor


def part_values(stored: Tensor, tensor: HfTensor, part: HfPart) -> Tensor:
    """Return the values of a part, in SPPO's layout, which may share memory with the tensor."""
    found = _rows(stored.mT if tensor.transposed else stored, tensor, part)
    if part.head_rows:
        return _reordered(found, part.head_rows)
    return found


def assemble(tensor: HfTensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Return one tensor as stored, on the CPU, in new memory.

    Raises:
        ValueError: Parameters of other shapes.
    """
    values = [_stored_order(weights[part.name].detach().cpu(), part) for part in tensor.parts]
    shape = torch.Size(tensor.shape)
    dtype = reduce(torch.promote_types, (value.dtype for value in values))
    result = torch.empty(shape[:-2] + shape[:-3:-1] if tensor.transposed else shape, dtype=dtype)
    for value, part in zip(values, tensor.parts, strict=True):
        rows = _rows(result, tensor, part)
        if rows.shape != value.shape:
            raise ValueError(
                f"{part.name} makes {tensor.full_name} {list(value.shape)}, "
                f"needs {list(rows.shape)}"
            )
        rows.copy_(value)
    return result.mT.contiguous() if tensor.transposed else result


def _rows(values: Tensor, tensor: HfTensor, part: HfPart) -> Tensor:
    """Return the outputs of a part in a tensor that is not transposed."""
    return values[:, part.rows] if tensor.stacked else values[part.rows]


def _stored_order(value: Tensor, part: HfPart) -> Tensor:
    """Return a parameter, or its share of one expert, with the outputs of heads as stored."""
    if part.expert is not None:
        return value[part.expert]
    if not part.head_rows:
        return value
    places = sorted(range(len(part.head_rows)), key=part.head_rows.__getitem__)
    return _reordered(value, places)


def _reordered(values: Tensor, order: Sequence[int]) -> Tensor:
    """Return outputs of heads ``[N * D, ...]`` with each head in another order."""
    heads = values.reshape(-1, len(order), *values.shape[1:])
    return heads[:, list(order)].flatten(0, 1)
