"""Memory that attention in blocks allocates on a CPU, beyond its operands.

The functions yield live bytes with a name; the largest counts
(:mod:`sppo.cost.live_sets.working_set`). They follow
:mod:`sppo.kernels.attention.block_attention` and :mod:`sppo.kernels.attention.cpu_flash`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import gcd

from sppo.cost.live_sets.attention_block_sizes import (
    Block,
    BlockKind,
    first_half,
    largest_blocks,
)
from sppo.cost.live_sets.cpu_scratch import cast_bytes, flash_bytes, flash_output_bytes
from sppo.cost.live_sets.tensor_sizes import LiveSet, TensorSizes
from sppo.cost.tiles import HALF_TOKENS, LEAST_PART_KEYS, MAX_CAUSAL_TOKENS
from sppo.cost.workload import ACCUMULATION_BYTES

_FLASH_COMPUTE_BYTES = 450 << 10
"""Bytes per thread that oneDNN allocates in torch's CPU flash backward in bf16, in addition to
:func:`sppo.cost.live_sets.cpu_scratch.flash_bytes`; measured with torch 2.13."""


def attention_forward(s: TensorSizes) -> Iterator[LiveSet]:
    """Yield the live bytes of an attention forward, without q, k and v."""
    # Queries by head, the running output and its lse.
    base = s.query_bytes + s.fp32_query_bytes + s.lse_bytes
    for block in largest_blocks(s):
        folded = block.folded_rows
        output = block.row_bytes(s.element_bytes) + s.lse_bytes_of(block.rows)
        held = base + output + _gathered_bytes(block, tensors=1) + _mask_bytes(block)
        scratch = flash_bytes(s, folded, block.keys, buffers=1) + flash_output_bytes(s, folded)
        yield block.name, held + scratch
        yield f"mask of {block.name}", base + _masking_bytes(block)
        if block.kind is BlockKind.CAUSAL or (block.is_full and s.prefix):
            yield f"merging {block.name}", base + _merging_bytes(block)


def attention_backward(s: TensorSizes) -> Iterator[LiveSet]:
    """Yield the live bytes of an attention backward, without q, o and do."""
    # Queries, outputs and their gradients by head, and the sum of dq.
    base = 3 * s.query_bytes + s.fp32_query_bytes
    for block in largest_blocks(s):
        for name, live in _block_backward(block, is_cast=s.is_half and s.casts):
            yield name, base + live
        yield f"mask of {block.name}", base + _masking_bytes(block)
    rest = s.rows % HALF_TOKENS
    if s.is_half and not s.casts and rest:
        block = Block(s, "a small causal square", BlockKind.CAUSAL, rest, rest)
        for name, live in _block_backward(block, is_cast=True):
            yield name, base + live


def _merging_bytes(block: Block) -> int:
    """Return the bytes of merging the output of a block with the output of earlier keys.

    These are the output and its lse, three tensors of weights, and a tile of the output in fp32.
    Without a prefix, no rows of the first half of the subsequence have an earlier output.
    """
    s, rows = block.s, block.s.rows
    later = rows if s.prefix else rows - first_half(rows) if rows > MAX_CAUSAL_TOKENS else 0
    merged = min(block.rows, later)
    o = s.pooled(merged * s.heads * s.model.head_dim * s.element_bytes)
    return o + 4 * s.lse_bytes_of(merged) + _gathered_bytes(block, tensors=1) + cast_bytes(s, o)


def _block_backward(block: Block, *, is_cast: bool) -> Iterator[LiveSet]:
    """Yield the live bytes of the backward of one block.

    Args:
        block: Block to compute.
        is_cast: Whether the operands of the block are cast from half precision to fp32.
    """
    s = block.s
    element_bytes = ACCUMULATION_BYTES if is_cast else s.element_bytes
    in_half = element_bytes < ACCUMULATION_BYTES
    multiple = HALF_TOKENS if in_half else 1
    keys = block.keys // multiple * multiple
    if block.kind is BlockKind.BAND and keys < block.keys:
        keys += multiple  # A band is extended, other blocks are cut.
    of_rows, of_keys = block.row_bytes(element_bytes), 2 * block.key_bytes(element_bytes, keys=keys)
    parts = _key_parts(block)
    held = _operand_bytes(block, is_cast=is_cast) + parts * of_rows + of_keys
    scratch = partial(flash_bytes, s, block.folded_rows, buffers=2, is_cast=is_cast)
    compute = s.threads * _FLASH_COMPUTE_BYTES * in_half
    # For several heads, the kernel allocates the product of o and do.
    has_product = parts > 1 or (s.key_heads if block.is_full else s.group) > 1
    yield block.name, held + parts * of_rows * has_product + scratch(keys) + compute
    if parts > 1:
        total = block.row_bytes(ACCUMULATION_BYTES) * in_half
        rest_keys = keys % (parts * multiple)
        rest = 2 * block.key_bytes(element_bytes, keys=rest_keys)
        if rest_keys:
            # Gradients of the remaining keys, and the product of o and do.
            taken = 2 * of_rows + rest + scratch(rest_keys) + compute
            yield f"rest of {block.name}", held + total + taken
        yield f"parts of {block.name} put together", held + total + rest + of_keys
    if in_half:
        adding = max(cast_bytes(s, of_rows), _key_sum_bytes(block, of_keys // 2))
        yield f"adding {block.name}", parts * of_rows + of_keys + adding


def _key_sum_bytes(block: Block, gradient_bytes: int) -> int:
    """Return the scratch of adding dk, or dv, in half precision to its sum in fp32.

    The query heads of a key head are summed in fp32 first, unless the block is a rectangle.
    """
    cast, group = cast_bytes(block.s, gradient_bytes), block.s.group
    return cast + cast // group if not block.is_full and group > 1 else cast


def _operand_bytes(block: Block, *, is_cast: bool) -> int:
    """Return the bytes of the copies of a block's operands, and of its mask, in backward.

    If the operands are cast, all but q and the mask are freed in half precision as soon as they are
    cast.
    """
    s, mask = block.s, _mask_bytes(block)
    if not is_cast:
        return _gathered_bytes(block, tensors=3) + mask
    rows = _gathered_bytes(block, tensors=1) + 3 * block.row_bytes(ACCUMULATION_BYTES)
    keys = 2 * s.pooled(block.keys * s.key_heads * s.model.head_dim * ACCUMULATION_BYTES)
    return rows + keys + mask + mask // s.element_bytes * ACCUMULATION_BYTES


def _gathered_bytes(block: Block, *, tensors: int) -> int:
    """Return the bytes of q, or of q, o and do, whose rows are put together by key head.

    Args:
        block: Block to compute; only a rectangle of some of the rows has copies.
        tensors: Number of tensors that are held while the kernel runs.
    """
    s = block.s
    return tensors * block.row_bytes(s.element_bytes) * (block.is_part and s.group > 1)


def _mask_bytes(block: Block) -> int:
    """Return the bytes of the mask of a band; 0 for the other kinds."""
    return block.s.pooled(block.mask_elements * block.s.element_bytes)


def _masking_bytes(block: Block) -> int:
    """Return the bytes of making the mask of a band: three masks of bools, or one and the mask."""
    return max(3, 1 + block.s.element_bytes) * block.s.pooled(block.mask_elements)


def _key_parts(block: Block) -> int:
    """Return the number of parts of the keys of a rectangle, which gives all threads equal work."""
    if not block.is_full:
        return 1
    threads = block.s.threads
    wanted = threads // gcd(block.s.key_heads, threads)
    return max(1, min(wanted, block.keys // LEAST_PART_KEYS))
