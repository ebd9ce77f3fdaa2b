"""Bytes that CPU kernels allocate inside: tiles of casts and sums, and scratch of products.

On a GPU all of them are 0: its kernels work in registers, and allocations inside attention calls
are in :mod:`sppo.cost.live_sets.gpu_attention_live_sets`.
"""

from __future__ import annotations

from sppo.cost.live_sets.tensor_sizes import TensorSizes
from sppo.cost.parameters import parameter_kind
from sppo.cost.tiles import ACCUMULATION_TILE_BYTES, CAST_TILE, TILE_BYTES, product_rows
from sppo.cost.workload import ACCUMULATION_BYTES
from sppo.units import MIB

_FLASH_KEYS = 512
_FLASH_ROWS = ((768, 256), (192, 64), (1, 32))
"""(least rows of a call, rows that torch's CPU flash kernels then process at once)."""
_PRODUCT_BYTES = 400 << 10
_WEIGHT_PRODUCT_BYTES = 2 * MIB
"""Scratch of oneDNN's bf16 products with transposed operands, as weight gradients have;
`_PRODUCT_BYTES` is that of all other products."""
_CAST_TILE_BYTES = ACCUMULATION_BYTES * CAST_TILE**2


def tiles_bytes(s: TensorSizes, count: int, *, width: int) -> int:
    """Return the bytes of ``count`` fp32 tiles of a tensor ``[C, width]``."""
    whole = s.tokens * width * ACCUMULATION_BYTES
    return count * min(TILE_BYTES, whole) if s.threads else 0


def cast_bytes(s: TensorSizes, compute_bytes: int) -> int:
    """Return the bytes of the fp32 tile by which a tensor is added to one in accumulation dtype.

    Args:
        s: Sizes of the subsequence.
        compute_bytes: Bytes of the tensor in the compute dtype.
    """
    fp32_bytes = compute_bytes // s.element_bytes * ACCUMULATION_BYTES
    return min(ACCUMULATION_TILE_BYTES, fp32_bytes) if s.threads and s.is_half else 0


def product_bytes(s: TensorSizes, *, is_added: bool = False) -> int:
    """Return the scratch of a bf16 product, which may be added to a bf16 tensor; 0 in fp32.

    By casts: tiles of both operands and of the sum, and if it is added, of the sum before.
    """
    if not (s.threads and s.is_half):
        return 0
    return (3 + is_added) * _CAST_TILE_BYTES if s.casts else _PRODUCT_BYTES


def mlp_gradient_bytes(s: TensorSizes) -> int:
    """Return the scratch of the weight and input gradients of the MLP.

    The weight of the last product takes most, unless it is frozen.
    """
    trained = {
        name: shape for name, shape in s.kind.trained_matrices if parameter_kind(name) == "mlp"
    }
    most = trained.get("down.weight")
    shapes = [*trained.values()] if most is None else [most]
    to_input = product_bytes(s, is_added=s.model.gated or bool(s.adapter_bytes("up")))
    return max(to_input, *(weight_gradient_bytes(s, *shape) for shape in shapes), 0)


def weight_gradient_bytes(s: TensorSizes, outputs: int, inputs: int) -> int:
    """Return the bytes of a bf16 weight gradient's tile, and scratch; 0 in fp32, added in place.

    By casts, the product is added in place, too, and tiles of both operands count.

    Args:
        s: Sizes of the subsequence.
        outputs: Rows of the weight.
        inputs: Columns of the weight.
    """
    if not (s.threads and s.is_half):
        return 0
    if s.casts:
        return 2 * _CAST_TILE_BYTES
    rows = min(outputs, product_rows(inputs, element_bytes=s.element_bytes))
    return rows * inputs * s.element_bytes + _WEIGHT_PRODUCT_BYTES


def flash_bytes(
    s: TensorSizes, rows: int, keys: int, *, buffers: int, is_cast: bool = False
) -> int:
    """Return the scratch of torch's CPU flash kernels: ``buffers`` tiles of scores per thread.

    Args:
        s: Sizes of the subsequence.
        rows: Queries of the call.
        keys: Keys of the call.
        buffers: Tiles of each thread.
        is_cast: Whether the operands of the call are cast to fp32.
    """
    widths = ACCUMULATION_BYTES + (s.element_bytes if s.is_half and not is_cast else 0)
    return s.threads * buffers * _flash_rows(rows) * min(keys, _FLASH_KEYS) * widths


def flash_output_bytes(s: TensorSizes, rows: int) -> int:
    """Return the scratch of torch's CPU flash forward for outputs, maxima and sums of rows."""
    return s.threads * _flash_rows(rows) * (s.model.head_dim + 2) * ACCUMULATION_BYTES


def _flash_rows(rows: int) -> int:
    return min(rows, next(size for least, size in _FLASH_ROWS if rows >= least))
