"""Products of linear layers: forward, input gradient, and fp32 sums of weight gradients.

Legend: C tokens, O outputs, I inputs; M x K and K x N operands of a product.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sppo.cost.tiles import product_rows
from sppo.kernels.elementwise import accumulation_dtype
from sppo.kernels.half_products import add_product_by_casts, needs_casts, product_by_casts
from sppo.kernels.row_tiles import row_tiles


def linear(x_CI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``, ``[C, O]``."""
    if needs_casts(x_CI):
        y_CO = x_CI.new_empty(x_CI.shape[0], weight_OI.shape[0])
        return product_by_casts(x_CI, weight_OI.t(), into_MN=y_CO, bias_N=bias_O)
    return functional.linear(x_CI, weight_OI, bias_O)


def wide_linear(x_CI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``, ``[C, O]``, in fp32, or in float64 for float64."""
    wide = accumulation_dtype(x_CI.dtype)
    if x_CI.dtype == wide:
        return functional.linear(x_CI, weight_OI, bias_O)
    if x_CI.device.type == "cuda":
        y_CO = torch.mm(x_CI, weight_OI.t(), out_dtype=wide)
    else:
        y_CO = x_CI.new_empty(x_CI.shape[0], weight_OI.shape[0], dtype=wide)
        for rows in row_tiles(x_CI):
            torch.mm(x_CI[rows].to(wide), weight_OI.t().to(wide), out=y_CO[rows])
    return y_CO if bias_O is None else y_CO.add_(bias_O)


def input_gradient(dy_CO: Tensor, weight_OI: Tensor, *, into_CI: Tensor | None = None) -> Tensor:
    """Return ``dy @ weight``, ``[C, I]``, written to ``into_CI`` if given."""
    if not needs_casts(dy_CO):
        return torch.mm(dy_CO, weight_OI, out=into_CI)
    if into_CI is None:
        into_CI = dy_CO.new_empty(dy_CO.shape[0], weight_OI.shape[1])
    return product_by_casts(dy_CO, weight_OI, into_MN=into_CI)


def add_product_(total_MN: Tensor, left_MK: Tensor, right_KN: Tensor) -> None:
    """Add ``left @ right`` to ``total_MN`` of the same dtype, in place."""
    if needs_casts(left_MK):
        add_product_by_casts(total_MN, left_MK, right_KN)
    else:
        total_MN.addmm_(left_MK, right_KN)


def accumulate_weight_gradient(total_OI: Tensor, dy_CO: Tensor, x_CI: Tensor) -> None:
    """Add ``dy.T @ x`` to ``total_OI`` (fp32 or better).

    A sum in bf16 would lose the small terms, e.g. over N = 160 subsequences. A GPU adds its fp32
    product in place, and so does a CPU that must cast to fp32. Other CPUs round a bf16 product to
    bf16, so the product is computed and added tile by tile.
    """
    if total_OI.dtype == x_CI.dtype:
        total_OI.addmm_(dy_CO.t(), x_CI)
    elif x_CI.device.type == "cuda":
        # Half-precision operands multiplied and added in fp32, in one kernel of cuBLAS.
        torch.addmm(total_OI, dy_CO.t(), x_CI, out_dtype=total_OI.dtype, out=total_OI)
    elif needs_casts(x_CI):
        add_product_by_casts(total_OI, dy_CO.t(), x_CI)
    else:
        _add_product_by_tiles(total_OI, dy_CO, x_CI)


def _add_product_by_tiles(total_OI: Tensor, dy_CO: Tensor, x_CI: Tensor) -> None:
    outputs, inputs = total_OI.shape
    step = product_rows(inputs, element_bytes=x_CI.element_size())
    for start in range(0, outputs, step):
        total_oI = total_OI[start : start + step]
        product_oI = dy_CO[:, start : start + step].t() @ x_CI
        for rows in row_tiles(total_oI):  # adding makes a cast copy of the product
            total_oI[rows].add_(product_oI[rows])
        del product_oI  # before the next tile is made


def accumulate_bias_gradient(total_O: Tensor, dy_CO: Tensor) -> None:
    """Add the sum of ``dy`` over tokens to ``total_O`` (fp32 or better)."""
    for rows in row_tiles(dy_CO):  # a sum in another dtype makes a cast copy
        total_O.add_(dy_CO[rows].sum(0, dtype=total_O.dtype))
