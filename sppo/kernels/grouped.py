"""Products of the experts of a layer with the rows that each of them gets.

Rows are sorted by expert, and ``offsets_X`` (int32, on their device) has the end of each expert's
rows; an expert may have none, or all. Where torch multiplies all experts in one kernel that takes
these operands, it does; everywhere else a loop over the experts uses the products of
:mod:`sppo.kernels.linear`, which on a GPU waits for the offsets. Weight gradients are fp32 sums in
both cases: torch would round them to the dtype of the operands, so a GPU has a kernel of its own.

Legend: R rows, X experts, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from sppo.kernels.fused import fused
from sppo.kernels.linear import accumulate_weight_gradient, input_gradient

_ALIGNED_BYTES = 16
_MOST_GROUPS = 1023
_CAPABILITIES = (9, 10)
"""Major compute capabilities for which torch has one kernel; for others it loops, too."""


def grouped_linear(x_RI: Tensor, weight_XOI: Tensor, offsets_X: Tensor) -> Tensor:
    """Return ``x @ weight[e].T`` of each row and its expert e, ``[R, O]``."""
    return _grouped_product(x_RI, weight_XOI.transpose(1, 2), offsets_X)


def grouped_input_gradient(dy_RO: Tensor, weight_XOI: Tensor, offsets_X: Tensor) -> Tensor:
    """Return ``dy @ weight[e]`` of each row and its expert e, ``[R, I]``."""
    return _grouped_product(dy_RO, weight_XOI, offsets_X)


def accumulate_grouped_weight_gradient_(
    total: Tensor, dy_RO: Tensor, x_RI: Tensor, offsets_X: Tensor
) -> None:
    """Add ``dy.T @ x`` of the rows of each expert to ``total``, fp32 or better.

    ``total`` is ``[X, O, I]``, or ``[X, O]`` if ``x_RI`` has one column. The sums of experts
    without rows are neither read nor written.
    """
    total_XOI = total.view(*total.shape[:2], x_RI.shape[1])
    if fused(x_RI):
        from sppo.kernels.triton.grouped import add_grouped_products_

        add_grouped_products_(total_XOI, dy_RO, x_RI, offsets_X)
        return
    for expert, rows in _rows_of_experts(offsets_X):
        accumulate_weight_gradient(total_XOI[expert], dy_RO[rows], x_RI[rows])


def _grouped_product(left_RK: Tensor, right_XKN: Tensor, offsets_X: Tensor) -> Tensor:
    """Return ``left @ right[e]`` of each row and its expert e, ``[R, N]``."""
    if _torch_multiplies(left_RK, right_XKN):
        product: Tensor = functional.grouped_mm(left_RK, right_XKN, offs=offsets_X)
        return product
    out_RN = left_RK.new_empty(left_RK.shape[0], right_XKN.shape[2])
    for expert, rows in _rows_of_experts(offsets_X):
        input_gradient(left_RK[rows], right_XKN[expert], into_CI=out_RN[rows])
    return out_RN


def _rows_of_experts(offsets_X: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, with its rows; waits for a GPU."""
    begin = 0
    for expert, end in enumerate(offsets_X.tolist()):
        if end > begin:
            yield expert, slice(begin, end)
        begin = end


def _torch_multiplies(left_RK: Tensor, right_XKN: Tensor) -> bool:
    """Return whether torch has one kernel for all experts that takes these operands.

    It multiplies bf16, and needs rows and the first elements at multiples of 16 bytes.
    """
    operands = left_RK, right_XKN
    return (
        left_RK.device.type == "cuda"
        and left_RK.dtype == torch.bfloat16
        and right_XKN.shape[0] <= _MOST_GROUPS
        and all(size * 2 % _ALIGNED_BYTES == 0 for size in right_XKN.shape[1:])
        and all(x.data_ptr() % _ALIGNED_BYTES == 0 for x in operands)
        and _has_kernel(left_RK.device)
    )


@lru_cache(maxsize=16)
def _has_kernel(device: torch.device) -> bool:
    """Return whether torch has one kernel for the products of all experts on a GPU."""
    return (
        hasattr(functional, "grouped_mm")
        and torch.cuda.get_device_capability(device)[0] in _CAPABILITIES
    )
