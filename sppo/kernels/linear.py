"""Products with weights: forward, input gradient, and the fp32 sum of weight gradients.

Legend: C tokens, O outputs, I inputs.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from sppo.kernels.row_tiles import row_tiles


def linear(x_CI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, ``[C, O]``."""
    return functional.linear(x_CI, weight_OI, bias_O)


def accumulate_weight_gradient(total_OI: Tensor, dy_CO: Tensor, x_CI: Tensor) -> None:
    """Add ``dy.T @ x`` to ``total_OI`` (fp32 or better).

    With N = 160 subsequences a sum kept in bf16 would lose the small ones; this one never is.
    """
    if total_OI.dtype == x_CI.dtype:
        total_OI.addmm_(dy_CO.t(), x_CI)
        return
    product_OI = dy_CO.t() @ x_CI
    for rows in row_tiles(total_OI):  # adding casts the product
        total_OI[rows].add_(product_OI[rows])


def accumulate_bias_gradient(total_O: Tensor, dy_CO: Tensor) -> None:
    """Add the sum of ``dy`` over tokens to ``total_O`` (fp32 or better)."""
    for rows in row_tiles(dy_CO):  # a sum in another dtype casts
        total_O.add_(dy_CO[rows].sum(0, dtype=total_O.dtype))
