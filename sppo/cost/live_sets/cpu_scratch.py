"""Bytes that CPU kernels take for themselves: tiles of casts and sums, and scratch of products.

On a GPU all of them are 0: its kernels work in registers, and what a package allocates inside a
call is in :mod:`sppo.cost.live_sets.attention_scratch`.
"""

from __future__ import annotations

from math import gcd

from sppo.cost.layer import ACCUMULATION_BYTES
from sppo.cost.live_sets.tensor_sizes import TensorSizes
from sppo.cost.parameters import layer_shapes
from sppo.cost.product_tile import product_rows
from sppo.units import MIB

TILE_BYTES = MIB
"""Bytes of a tile of one fp32 operand of an element-wise chain on a CPU, as in
:mod:`sppo.kernels.row_tiles`."""
ACCUMULATION_TILE_BYTES = 8 * MIB
"""Bytes of a tile that is cast for a single step, as in :mod:`sppo.kernels.row_tiles`."""
_FLASH_KEYS = 512
_FLASH_ROWS = ((768, 256), (192, 64), (1, 32))
"""Rows that torch's CPU flash kernels take at once, by the rows there are at least."""
_PRODUCT_BYTES = 400 << 10
_WEIGHT_PRODUCT_BYTES = 2 * MIB
"""Scratch of oneDNN's bf16 products, ours and those with transposed operands; the same."""


def tiles_bytes(s: TensorSizes, count: int, *, width: int) -> int:
    """Return the bytes of ``count`` fp32 tiles of a tensor ``[C, width]``."""
    whole = s.tokens * width * ACCUMULATION_BYTES
    return count * min(TILE_BYTES, whole) if s.threads else 0


def cast_bytes(s: TensorSizes, compute_bytes: int) -> int:
    """Return the bytes of a tile of a tensor in fp32, made where it joins an accumulated one.

    Args:
        s: sizes of the subsequence.
        compute_bytes: of the tensor, in the compute dtype.
    """
    fp32_bytes = compute_bytes // s.element * ACCUMULATION_BYTES
    return min(ACCUMULATION_TILE_BYTES, fp32_bytes) if s.threads and s.is_half else 0


def group_sum_bytes(s: TensorSizes, compute_bytes: int) -> int:
    """Return what key gradients of every query head take while they become those of key heads."""
    group = s.model.num_heads // s.model.kv_heads
    cast = cast_bytes(s, compute_bytes)
    return cast + cast // group if group > 1 else cast


def product_bytes(s: TensorSizes) -> int:
    """Return the scratch of a bf16 product."""
    return _PRODUCT_BYTES if s.threads and s.is_half else 0


def layer_weight_gradient_bytes(s: TensorSizes, name: str) -> int:
    """Return :func:`weight_gradient_bytes` of a layer's product ``name``."""
    outputs, inputs = layer_shapes(s.model)[f"{name}.weight"]
    return weight_gradient_bytes(s, outputs, inputs)


def weight_gradient_bytes(s: TensorSizes, outputs: int, inputs: int) -> int:
    """Return a weight gradient's tile before it joins its fp32 sum; fp32 ones are added in place.

    Args:
        s: sizes of the subsequence.
        outputs: of the product.
        inputs: of the product.
    """
    if not (s.threads and s.is_half):
        return 0
    rows = min(outputs, product_rows(inputs, element_bytes=s.element))
    return rows * inputs * s.element + _WEIGHT_PRODUCT_BYTES


def key_parts(s: TensorSizes) -> int:
    """Return the parts of a prefix that give every thread the same work, as in its kernel."""
    return s.threads // gcd(s.model.kv_heads, s.threads) if s.threads else 1


def flash_bytes(s: TensorSizes, rows: int, *, buffers: int) -> int:
    """Return the scratch of torch's CPU flash kernels: ``buffers`` tiles of scores per thread."""
    if not s.threads:
        return 0
    at_once = next(size for least, size in _FLASH_ROWS if rows >= least)
    widths = ACCUMULATION_BYTES + (s.element if s.is_half else 0)
    return s.threads * buffers * min(at_once, rows) * _FLASH_KEYS * widths
