"""Memory that attention in blocks allocates on a CPU, beyond its operands.

The functions yield live bytes with a name; the largest counts
(:mod:`sppo.cost.live_sets.working_set`). They follow
:mod:`sppo.kernels.attention.block_attention` and :mod:`sppo.kernels.attention.cpu_flash`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import gcd

from sppo.cost.layer import ACCUMULATION_BYTES
from sppo.cost.live_sets.attention_block_sizes import (
    CAUSAL_TOKENS,
    HALF_TOKENS,
    Block,
    BlockKind,
    first_half,
    largest_blocks,
)
from sppo.cost.live_sets.cpu_scratch import cast_bytes, flash_bytes, flash_output_bytes
from sppo.cost.live_sets.tensor_sizes import LiveSet, TensorSizes

LEAST_PART_KEYS = 512
"""Fewest keys of a part of a rectangle whose keys are divided over threads because it has fewer
heads than threads."""
_FLASH_COMPUTE_BYTES = 450 << 10
"""Bytes per thread that oneDNN allocates in torch's CPU flash backward in bf16, in addition to
:func:`sppo.cost.live_sets.cpu_scratch.flash_bytes`; measured with torch 2.13."""


def attention_forward(s: TensorSizes) -> Iterator[LiveSet]:
    """Yield the live bytes of an attention forward, without q, k and v."""
    # Queries by head, the running output and its lse.
    merged = s.fp32_query_bytes + s.lse_bytes
    base = s.query_bytes + merged
    for block in largest_blocks(s):
        folded = _folded_rows(s, block)
        o = _row_bytes(s, block.rows, s.element_bytes)
        lse = s.pooled(block.rows * s.heads * ACCUMULATION_BYTES)
        held = base + o + lse + _gathered_bytes(s, block, tensors=1) + _mask_bytes(s, block)
        scratch = flash_bytes(s, folded, block.keys, buffers=1) + flash_output_bytes(s, folded)
        yield block.name, held + scratch
        yield f"mask of {block.name}", base + _masking_bytes(s, block)
        if block.kind is BlockKind.CAUSAL or (block.kind is BlockKind.FULL and s.prefix):
            yield f"merging {block.name}", base + _merging_bytes(s, block)
    yield "output", merged + s.query_bytes


def attention_backward(s: TensorSizes) -> Iterator[LiveSet]:
    """Yield the live bytes of an attention backward, without q, o and do."""
    # Queries, outputs and their gradients by head, and the sum of dq.
    base = 3 * s.query_bytes + s.fp32_query_bytes
    for block in largest_blocks(s):
        for name, live in _block_backward(s, block, is_cast=s.is_half and s.casts):
            yield name, base + live
        yield f"mask of {block.name}", base + _masking_bytes(s, block)
    rest = s.rows % HALF_TOKENS
    if s.is_half and not s.casts and rest:
        block = Block("a small causal square", BlockKind.CAUSAL, rest, rest)
        for name, live in _block_backward(s, block, is_cast=True):
            yield name, base + live


def _merging_bytes(s: TensorSizes, block: Block) -> int:
    """Return the bytes of merging the output of a block with the output of earlier keys.

    These are the output and its lse, three tensors of weights, and a tile of the output in fp32.
    Without a prefix, no rows of the first half of the subsequence have an earlier output.
    """
    rows = s.rows
    later = rows if s.prefix else rows - first_half(rows) if rows > CAUSAL_TOKENS else 0
    merged = min(block.rows, later)
    o = _row_bytes(s, merged, s.element_bytes)
    lse = s.pooled(merged * s.heads * ACCUMULATION_BYTES)
    return o + 4 * lse + _gathered_bytes(s, block, tensors=1) + cast_bytes(s, o)


def _block_backward(s: TensorSizes, block: Block, *, is_cast: bool) -> Iterator[LiveSet]:
    """Yield the live bytes of the backward of one block.

    Args:
        s: Sizes of the subsequence.
        block: Block to compute.
        is_cast: Whether the operands of the block are cast from half precision to fp32.
    """
    element_bytes = ACCUMULATION_BYTES if is_cast else s.element_bytes
    multiple = HALF_TOKENS if element_bytes < ACCUMULATION_BYTES else 1
    keys = _whole_keys(block, multiple)
    of_rows = _row_bytes(s, block.rows, element_bytes)
    of_keys = _key_gradient_bytes(s, block, keys, element_bytes)
    parts = _key_parts(s, block)
    held = _operand_bytes(s, block, is_cast=is_cast) + parts * of_rows + of_keys
    compute = s.threads * _FLASH_COMPUTE_BYTES * (element_bytes < ACCUMULATION_BYTES)
    scratch = partial(flash_bytes, s, _folded_rows(s, block), buffers=2, is_cast=is_cast)
    products = parts * of_rows * _multiplies_apart(s, block)
    yield block.name, held + products + scratch(keys) + compute
    if parts > 1:
        total = _row_bytes(s, block.rows, ACCUMULATION_BYTES) * (multiple > 1)
        rest_keys = keys % (parts * multiple)
        rest = _key_gradient_bytes(s, block, rest_keys, element_bytes)
        if rest_keys:
            # Gradients of the remaining keys, and the product of o and do.
            taken = 2 * of_rows + rest + scratch(rest_keys) + compute
            yield f"rest of {block.name}", held + total + taken
        yield f"parts of {block.name} put together", held + total + rest + of_keys
    if multiple > 1:
        adding = max(cast_bytes(s, of_rows), _key_sum_bytes(s, block, of_keys // 2))
        yield f"adding {block.name}", parts * of_rows + of_keys + adding


def _whole_keys(block: Block, multiple: int) -> int:
    """Return the keys of a block that is cut, or if it is a band extended, to whole multiples."""
    keys = block.keys // multiple * multiple
    return keys + multiple if block.kind is BlockKind.BAND and keys < block.keys else keys


def _key_sum_bytes(s: TensorSizes, block: Block, gradient_bytes: int) -> int:
    """Return the scratch of adding dk, or dv, in half precision to its sum in fp32.

    The query heads of a key head are summed in fp32 first, unless the block is a rectangle.
    """
    cast = cast_bytes(s, gradient_bytes)
    has_sum = block.kind is not BlockKind.FULL and s.group > 1
    return cast + cast // s.group if has_sum else cast


def _operand_bytes(s: TensorSizes, block: Block, *, is_cast: bool) -> int:
    """Return the bytes of the copies of a block's operands, and of its mask, in backward.

    If the operands are cast, all but q and the mask are freed in half precision as soon as they are
    cast.
    """
    mask = _mask_bytes(s, block)
    if not is_cast:
        return _gathered_bytes(s, block, tensors=3) + mask
    rows = _gathered_bytes(s, block, tensors=1)
    rows += 3 * _row_bytes(s, block.rows, ACCUMULATION_BYTES)
    of_head = s.model.head_dim * ACCUMULATION_BYTES
    keys = 2 * s.pooled(block.keys * s.key_heads * of_head)
    return rows + keys + mask + mask // s.element_bytes * ACCUMULATION_BYTES


def _multiplies_apart(s: TensorSizes, block: Block) -> bool:
    """Return whether the kernel allocates the product of o and do, as for several heads."""
    heads = s.key_heads if block.kind is BlockKind.FULL else s.group
    return heads > 1 or _key_parts(s, block) > 1


def _row_bytes(s: TensorSizes, rows: int, element_bytes: int) -> int:
    """Return the bytes of q, o, or the gradient of one of them, for the rows of a block."""
    return s.pooled(rows * s.heads * s.model.head_dim * element_bytes)


def _key_gradient_bytes(s: TensorSizes, block: Block, keys: int, element_bytes: int) -> int:
    """Return the bytes of dk and dv together for some keys of a block."""
    heads = s.key_heads if block.kind is BlockKind.FULL else s.heads
    return 2 * s.pooled(keys * heads * s.model.head_dim * element_bytes)


def _gathered_bytes(s: TensorSizes, block: Block, *, tensors: int) -> int:
    """Return the bytes of q, or of q, o and do, whose rows are put together by key head.

    Args:
        s: Sizes of the subsequence.
        block: Block to compute; only a rectangle of some of the rows has copies.
        tensors: Number of tensors that are held while the kernel runs.
    """
    is_part = block.kind is BlockKind.FULL and block.rows < s.rows
    return tensors * _row_bytes(s, block.rows, s.element_bytes) * (is_part and s.group > 1)


def _mask_bytes(s: TensorSizes, block: Block) -> int:
    """Return the bytes of the mask of a band; 0 for the other kinds."""
    return s.pooled(block.rows * block.keys * s.element_bytes) * (block.kind is BlockKind.BAND)


def _masking_bytes(s: TensorSizes, block: Block) -> int:
    """Return the bytes of making the mask of a band: three masks of bools, or one and the mask."""
    pairs = s.pooled(block.rows * block.keys)
    return max(3, 1 + s.element_bytes) * pairs * (block.kind is BlockKind.BAND)


def _key_parts(s: TensorSizes, block: Block) -> int:
    """Return the number of parts of the keys of a rectangle, which gives all threads equal work."""
    if block.kind is not BlockKind.FULL:
        return 1
    wanted = s.threads // gcd(s.key_heads, s.threads)
    return max(1, min(wanted, block.keys // LEAST_PART_KEYS))


def _folded_rows(s: TensorSizes, block: Block) -> int:
    return block.rows * s.group if block.kind is BlockKind.FULL else block.rows
