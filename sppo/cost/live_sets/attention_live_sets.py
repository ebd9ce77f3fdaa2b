"""Memory that attention allocates beyond its operands, on a CPU and with each GPU back end.

The functions yield live bytes with a name; the largest counts
(:mod:`sppo.cost.live_sets.working_set`).
"""

from __future__ import annotations

from collections.abc import Iterator

from sppo.cost.layer import ACCUMULATION_BYTES
from sppo.cost.live_sets.attention_scratch import backward_scratch_bytes
from sppo.cost.live_sets.cpu_scratch import (
    cast_bytes,
    flash_bytes,
    flash_output_bytes,
    group_sum_bytes,
    key_parts,
)
from sppo.cost.live_sets.tensor_sizes import TensorSizes

CAUSAL_TOKENS = 2048
"""Most rows of a causal square, as in :mod:`sppo.kernels.attention.blocks`."""
PREFIX_KEYS = 8192
"""Most keys of a part of a prefix, as in :mod:`sppo.kernels.attention.blocks`."""
HALF_TOKENS = 256
"""Multiple of rows and keys for which a CPU computes attention in bf16; the remainder is computed
in fp32, as in :mod:`sppo.kernels.attention.cpu_flash`."""
LEAST_PART_KEYS = 512
"""Fewest keys of a part of a prefix if the prefix is divided over threads because there are fewer
heads than threads, as in :mod:`sppo.kernels.attention.cpu_flash`."""

SPAN_KEYS = 16384
"""Most keys of one backward call of flash-attn, as in
:mod:`sppo.kernels.attention.rectangle_attention`."""
_WHOLE_SPANS = frozenset(("flash_attn_2", "flash_attn_3", "flash_attn_4", "torch_flash", "triton"))
"""Back ends that compute a span of queries and its keys in one call instead of blocks."""
_FLASH_COMPUTE_BYTES = 450 << 10
"""Bytes per thread that oneDNN allocates in torch's CPU flash backward in bf16, in addition to
:func:`sppo.cost.live_sets.cpu_scratch.flash_bytes`; measured with torch 2.13."""


def attention_forward(s: TensorSizes) -> Iterator[tuple[str, int]]:
    """Yield the live bytes of an attention forward, without q, k and v."""
    if s.backend in _WHOLE_SPANS:
        yield "a span", s.query_bytes + s.lse_bytes  # o and lse
        return
    # Queries by head, the running output, and the output of a block.
    merged, block = s.fp32_query_bytes + s.lse_bytes, s.query_bytes + s.lse_bytes
    scratch = flash_bytes(s, s.tokens, buffers=1) + flash_output_bytes(s, s.tokens)
    yield "a block", s.query_bytes + merged + block + scratch
    if s.threads:
        yield (
            "merging",
            s.query_bytes + merged + block + 3 * s.lse_bytes + cast_bytes(s, s.query_bytes),
        )
    yield "output", merged + s.query_bytes


def attention_backward(s: TensorSizes) -> Iterator[tuple[str, int]]:
    """Yield the live bytes of an attention backward, without q, o and do."""
    if s.backend == "triton":
        yield "a span", s.query_bytes + s.lse_bytes  # dq, and the row sums of o and do
    elif s.backend in _WHOLE_SPANS:
        yield from _spans_backward(s)
    elif s.threads and s.is_half and s.casts:
        yield from _cast_blocks_backward(s)
    elif s.threads:
        yield from _blocks_backward(s)
    else:
        yield from _gpu_blocks_backward(s)


def _spans_backward(s: TensorSizes) -> Iterator[tuple[str, int]]:
    """Yield the live bytes of one flash-attn call per part of the keys, and of the sum of dq."""
    rows = s.tokens * s.degree
    if s.model.sliding_window is not None:
        keys, is_cut = min(s.seen_keys, rows + s.model.sliding_window), False
    else:  # The causal part is not cut.
        keys = min(s.seen_keys, max(SPAN_KEYS, rows))
        is_cut = s.seen_keys > keys
    part = s.query_bytes + 2 * keys * s.key_row_bytes + _scratch(s, s.tokens * s.degree, keys)
    yield "a part of the keys", (s.fp32_query_bytes if is_cut else 0) + part
    if is_cut:
        yield "sum of dq", s.fp32_query_bytes + s.query_bytes


def _gpu_blocks_backward(s: TensorSizes) -> Iterator[tuple[str, int]]:
    """Yield the live bytes of a backward in blocks on a GPU.

    Live are q, o and do by head, the sum of dq, and dq, dk and dv of a block. Calls on blocks have
    as many key heads as query heads.
    """
    base = 3 * s.query_bytes + s.fp32_query_bytes
    rows = s.tokens * s.degree
    square = min(rows, CAUSAL_TOKENS)
    of_square = s.query_bytes * square // rows
    # dq, dk and dv, and k and v repeated for every query head.
    yield "a causal square", base + 5 * of_square + _folded_scratch(s, square)
    if s.prefix:
        keys = min(s.prefix, PREFIX_KEYS)
        taken = s.query_bytes + _folded_scratch(s, rows) + 2 * keys * s.key_row_bytes
        yield "the prefix", base + taken
    if rows > CAUSAL_TOKENS:
        keys = _first_half(rows)
        later = rows - keys
        # dq and copies of q, o and do of the later half of the rows.
        taken = 4 * s.query_bytes * later // rows + _folded_scratch(s, later, keys)
        yield "half of a square", base + taken + 2 * keys * s.key_row_bytes
    yield "output", s.fp32_query_bytes + s.query_bytes


def _blocks_backward(s: TensorSizes) -> Iterator[tuple[str, int]]:
    """Yield the live bytes of a backward in blocks on a CPU.

    Live are q, o and do by head, the sum of dq, and the gradients of a block.
    """
    base = 3 * s.query_bytes + s.fp32_query_bytes
    in_kernel = base + s.threads * _FLASH_COMPUTE_BYTES * s.is_half
    square = min(s.tokens, CAUSAL_TOKENS)
    of_square = s.query_bytes * square // s.tokens
    # dq, dk and dv of every query head, and the product of o and do.
    yield "a causal square", in_kernel + 4 * of_square + flash_bytes(s, square, buffers=2)
    rows = s.tokens % HALF_TOKENS if s.is_half else 0
    if rows:
        yield "a small causal square", base + _cast_square_bytes(s, rows)
    yield "adding a causal square", base + 3 * of_square + group_sum_bytes(s, of_square)
    if s.prefix:
        keys = min(s.prefix, PREFIX_KEYS)
        parts = max(1, min(key_parts(s), keys // LEAST_PART_KEYS))
        key_gradients = 2 * keys * s.key_row_bytes * s.degree
        of_parts = parts * s.query_bytes + key_gradients
        # Inside the kernel also the product of o and do of each part.
        products = parts * s.query_bytes
        yield (
            "the prefix",
            in_kernel + of_parts + products + flash_bytes(s, s.tokens, buffers=2),
        )
        yield (
            "adding to the prefix",
            base + of_parts + cast_bytes(s, max(s.query_bytes, key_gradients // 2)),
        )
        if parts > 1:
            yield (
                "parts of the prefix put together",
                base + of_parts + s.fp32_query_bytes + key_gradients,
            )


def _cast_blocks_backward(s: TensorSizes) -> Iterator[tuple[str, int]]:
    """Yield the live bytes of a backward in blocks whose operands a CPU casts from bf16 to fp32.

    Live are q, o and do by head, the sum of dq, and the operands and gradients of a block in fp32.
    The gradients are added without further casts, when the operands are freed.
    """
    base = 3 * s.query_bytes + s.fp32_query_bytes
    rows = s.tokens * s.degree
    yield "a causal square", base + _cast_square_bytes(s, _largest_square(rows))
    if rows > CAUSAL_TOKENS:
        keys = _first_half(rows)
        later = rows - keys
        # If several query heads share a key head, the rows of q are put together in a copy.
        copied = s.query_bytes * later // rows * _shares_key_heads(s)
        yield "half of a square", base + copied + _cast_rectangle_bytes(s, later, keys)
    if s.prefix:
        yield "the prefix", base + _cast_rectangle_bytes(s, rows, min(s.prefix, PREFIX_KEYS))


def _largest_square(rows: int) -> int:
    """Return the rows of the largest causal square after squares that are too large are halved."""
    while rows > CAUSAL_TOKENS:
        rows = _first_half(rows)
    return rows


def _first_half(rows: int) -> int:
    """Return the rows of the first half of a causal square, the larger one."""
    return -(-(rows // 2) // HALF_TOKENS) * HALF_TOKENS


def _cast_square_bytes(s: TensorSizes, rows: int) -> int:
    """Return the bytes that the fp32 backward of a causal square of bf16 tensors allocates.

    These are q, o and do; dq, dk and dv of every query head; k and v; and, if several query heads
    share a key head, the product of o and do.
    """
    of_rows = s.fp32_query_bytes * rows // (s.tokens * s.degree)
    of_keys = 2 * s.pooled(rows * _fp32_key_row_bytes(s))
    scratch = flash_bytes(s, rows, buffers=2, is_cast=True)
    return (6 + _shares_key_heads(s)) * of_rows + of_keys + scratch


def _cast_rectangle_bytes(s: TensorSizes, rows: int, keys: int) -> int:
    """Return the bytes that the fp32 backward of a rectangle of bf16 tensors allocates.

    These are q, o and do; k and v; dk and dv; and, for each part of the keys, dq and the product of
    o and do. Parts are put together after the products are freed.
    """
    of_rows = s.fp32_query_bytes * rows // (s.tokens * s.degree)
    of_keys = 2 * s.pooled(keys * _fp32_key_row_bytes(s))
    parts = max(1, min(key_parts(s), keys // LEAST_PART_KEYS))
    joined = of_keys if parts > 1 else 0
    in_kernel = parts * of_rows + flash_bytes(s, rows, buffers=2, is_cast=True)
    return (3 + parts) * of_rows + 2 * of_keys + max(in_kernel, joined)


def _shares_key_heads(s: TensorSizes) -> bool:
    """Return whether several query heads share a key head."""
    return s.model.num_heads > s.model.kv_heads


def _fp32_key_row_bytes(s: TensorSizes) -> int:
    """Return the bytes of k, or v, of one token in the key heads of one device, in fp32."""
    return s.key_row_bytes // s.element_bytes * ACCUMULATION_BYTES


def _scratch(s: TensorSizes, rows: int, keys: int) -> int:
    """Return the bytes that one backward call of the back end allocates inside."""
    return _scratch_of_heads(s, rows, keys, kv_heads=max(1, s.model.kv_heads // s.degree))


def _folded_scratch(s: TensorSizes, rows: int, keys: int | None = None) -> int:
    """Return the bytes that a backward call with as many key heads as query heads allocates.

    Args:
        s: Sizes of the subsequence.
        rows: Queries of the call.
        keys: Keys of the call; None for as many as rows.
    """
    return _scratch_of_heads(s, rows, keys or rows, kv_heads=max(1, s.model.num_heads // s.degree))


def _scratch_of_heads(s: TensorSizes, rows: int, keys: int, *, kv_heads: int) -> int:
    return backward_scratch_bytes(
        s.backend,
        rows=rows,
        keys=keys,
        heads=max(1, s.model.num_heads // s.degree),
        kv_heads=kv_heads,
        head_size=s.model.head_dim,
        element_bytes=s.element_bytes,
    )
