"""Values of parameters taken from stored tensors, and stored tensors made of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sppo.model.huggingface.stored_tensors import HfPart, HfTensor


def part_values(stored: Tensor, tensor: HfTensor, part: HfPart) -> Tensor:
    """Return the values of a part, in SPPO's layout, which may share memory with the tensor."""
    found = _outputs(_with_our_axes(stored, tensor), tensor, part)
    if part.head_rows:
        return _reordered(found, part.head_rows)
    return found


def assemble(tensor: HfTensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Return one tensor as stored, on the CPU, in new memory.

    Raises:
        ValueError: Parameters of other shapes.
    """
    values = [_stored_order(weights[part.name].detach().cpu(), part) for part in tensor.parts]
    whole = _with_our_axes(torch.empty(tensor.shape, device="meta"), tensor)
    for value, part in zip(values, tensor.parts, strict=True):
        needed = _outputs(whole, tensor, part).shape
        if value.shape != needed:
            raise ValueError(
                f"{part.name} makes {tensor.full_name} {list(value.shape)}, needs {list(needed)}"
            )
    axis = int(tensor.stacked)
    shares = [_groups(value, tensor) for value in values]
    result = torch.cat(shares, dim=axis + 1).flatten(axis, axis + 1)
    if tensor.depthwise:
        return result.unsqueeze(1)
    return result.mT.contiguous() if tensor.transposed else result


def _with_our_axes(stored: Tensor, tensor: HfTensor) -> Tensor:
    """Return a stored tensor as ``[outputs, inputs]``, or one of them for each expert."""
    if tensor.depthwise:
        return stored.squeeze(1)
    return stored.mT if tensor.transposed else stored


def _outputs(values: Tensor, tensor: HfTensor, part: HfPart) -> Tensor:
    """Return the outputs of a part in a tensor with our axes: its share of each group."""
    groups = _groups(values, tensor)
    if tensor.stacked:
        return groups[:, :, part.rows].flatten(1, 2)
    return groups[:, part.rows].flatten(0, 1)


def _groups(values: Tensor, tensor: HfTensor) -> Tensor:
    """Return values with the outputs in two dimensions: groups, and outputs of a group."""
    before, behind = values.shape[: tensor.stacked], values.shape[tensor.stacked + 1 :]
    return values.reshape(*before, tensor.groups, -1, *behind)


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
