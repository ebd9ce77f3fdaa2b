"""Memory that attention takes beside its operands: blocks on a CPU, kernels of back ends on a GPU.

Every function yields named live bytes; the largest counts (:mod:`sppo.cost.working_set`).
"""

from __future__ import annotations

from collections.abc import Iterator

from sppo.cost.tensor_sizes import TensorSizes

CAUSAL_TOKENS = 2048
"""Rows of the largest causal square, as in :mod:`sppo.kernels.attention.blocks`."""
PREFIX_KEYS = 8192
"""Keys of the longest part of a prefix, as there."""
HALF_TOKENS = 256
"""Rows and keys in multiples of which attention is computed in bf16 on a CPU, as in
:mod:`sppo.kernels.attention.cpu_flash`; the rest is in fp32."""
LEAST_PART_KEYS = 512
"""Fewest keys of the parts that a prefix is cut into where it has fewer heads than there are
threads, as in :mod:`sppo.kernels.attention.cpu_flash`."""

SPAN_KEYS = 16384
"""Keys of one backward call of flash-attn, as in
:mod:`sppo.kernels.attention.rectangle_attention`."""
_WHOLE_SPANS = frozenset(("flash_attn_2", "flash_attn_3", "flash_attn_4", "torch_flash", "triton"))
"""Back ends that take a span of queries and its keys in one call, not in blocks."""
_FLASH_COMPUTE_BYTES = 450 << 10
"""What its backward takes beyond that per thread, in bf16; measured with torch 2.13."""


def attention_forward(s: TensorSizes) -> Iterator[tuple[str, int]]:
    """Yield live bytes beside q, k and v."""
    if s.backend in _WHOLE_SPANS:
        yield "a span", s.query + s.lse  # o and lse
        return
    # Queries by head, the running output, a block's output.
    merged, block = s.fp32_query + s.lse, s.query + s.lse
    yield "a block", s.query + merged + block + s.flash_scratch(s.tokens, buffers=1)
    if s.threads:
        yield "merging", s.query + merged + block + 3 * s.lse + s.cast(s.query)
    yield "output", merged + s.query


def attention_backward(s: TensorSizes) -> Iterator[tuple[str, int]]:
    """Yield live bytes beside q, o and do."""
    if s.backend == "triton":
        yield "a span", s.query + s.lse  # dq, and the row sums of o and do
    elif s.backend in _WHOLE_SPANS:
        yield from _spans_backward(s)
    elif s.threads:
        yield from _blocks_backward(s)
    else:
        yield from _gpu_blocks_backward(s)


def _spans_backward(s: TensorSizes) -> Iterator[tuple[str, int]]:
    """A flash-attn call for each part of the keys: dq, dk and dv of its own, and their sum."""
    rows = s.tokens * s.degree
    if s.model.sliding_window is not None:
        keys, is_cut = min(s.seen_keys, rows + s.model.sliding_window), False
    else:  # the causal part is not cut
        keys = min(s.seen_keys, max(SPAN_KEYS, rows))
        is_cut = s.seen_keys > keys
    part = s.query + 2 * keys * s.key_row + s.attention_scratch(s.tokens * s.degree, keys)
    yield "a part of the keys", (s.fp32_query if is_cut else 0) + part
    if is_cut:
        yield "sum of dq", s.fp32_query + s.query


def _gpu_blocks_backward(s: TensorSizes) -> Iterator[tuple[str, int]]:
    """All three by head, the sum of dq; dq, dk and dv of a block, whose calls fold groups away."""
    base = 3 * s.query + s.fp32_query
    rows = s.tokens * s.degree
    square = min(rows, CAUSAL_TOKENS)
    of_square = s.query * square // rows
    # dq, dk, dv and dense k and v of every query head.
    yield "a causal square", base + 5 * of_square + s.folded_scratch(square)
    if s.prefix:
        keys = min(s.prefix, PREFIX_KEYS)
        taken = s.query + s.folded_scratch(rows) + 2 * keys * s.key_row
        yield "the prefix", base + taken
    if rows > CAUSAL_TOKENS:
        half = -(-rows // 2)
        # dq and copies of q, o and do of the later half of the rows.
        taken = 4 * s.query * half // rows + s.folded_scratch(half)
        yield "half of a square", base + taken + 2 * half * s.key_row
    yield "output", s.fp32_query + s.query


def _blocks_backward(s: TensorSizes) -> Iterator[tuple[str, int]]:
    """All three by head, the sum of dq, and a block's gradients, on a CPU."""
    base = 3 * s.query + s.fp32_query + s.threads * (_FLASH_COMPUTE_BYTES if s.is_half else 0)
    square = min(s.tokens, CAUSAL_TOKENS)
    of_square = s.query * square // s.tokens
    # dq, dk and dv of every query head, and the product of o and do.
    yield "a causal square", base + 4 * of_square + s.flash_scratch(square, buffers=2)
    rows = s.tokens % HALF_TOKENS if s.is_half and s.threads else 0
    if rows:
        # Beside the same four: q, o, do, k and v cast.
        operands = (7 * s.fp32_query + 2 * s.cast_key) * rows // s.tokens
        yield "a small causal square", base + operands + s.flash_scratch(rows, buffers=2)
    yield "adding a causal square", base + 3 * of_square + s.group_sum(of_square)
    if s.prefix:
        keys = min(s.prefix, PREFIX_KEYS)
        parts = max(1, min(s.key_parts, keys // LEAST_PART_KEYS))
        key_gradients = 2 * keys * (s.key // s.tokens)
        of_parts = parts * s.query + key_gradients
        # And the product of o and do.
        in_kernel = of_parts + parts * s.query + s.flash_scratch(s.tokens, buffers=2)
        yield "the prefix", base + in_kernel
        yield "adding to the prefix", base + of_parts + s.cast(max(s.query, key_gradients // 2))
        if parts > 1:
            yield "parts of the prefix put together", base + of_parts + s.fp32_query + key_gradients
