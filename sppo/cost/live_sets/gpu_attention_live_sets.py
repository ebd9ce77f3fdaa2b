"""Memory that attention allocates beyond its operands, with each back end of a GPU.

The functions yield live bytes with a name; the largest counts
(:mod:`sppo.cost.live_sets.working_set`).
"""

from __future__ import annotations

from collections.abc import Iterator

from sppo.cost.live_sets.attention_block_sizes import CAUSAL_TOKENS, PREFIX_KEYS, first_half
from sppo.cost.live_sets.attention_scratch import backward_scratch_bytes
from sppo.cost.live_sets.tensor_sizes import TensorSizes

SPAN_KEYS = 16384
"""Most keys of one backward call of flash-attn, as in
:mod:`sppo.kernels.attention.rectangle_attention`."""
CALL_ELEMENTS = 1 << 30
"""Most elements of the keys of one forward call of flash-attn, as there."""
_WHOLE_SPANS = frozenset(("flash_attn_2", "flash_attn_3", "flash_attn_4", "torch_flash", "triton"))
"""Back ends that compute a span of queries and its keys in one call instead of blocks."""


def attention_forward(s: TensorSizes) -> Iterator[tuple[str, int]]:
    """Yield the live bytes of an attention forward, without q, k and v."""
    if s.backend in _WHOLE_SPANS:
        part = s.query_bytes + s.lse_bytes  # o and lse
        if not _merges_spans(s):
            yield "a span", part
            return
        merged = s.fp32_query_bytes + s.lse_bytes
        yield "a part of the keys", merged + part
        yield "output", merged + s.query_bytes
        return
    # Queries by head, the running output, and the output of a block.
    merged, block = s.fp32_query_bytes + s.lse_bytes, s.query_bytes + s.lse_bytes
    yield "a block", s.query_bytes + merged + block
    yield "output", merged + s.query_bytes


def _merges_spans(s: TensorSizes) -> bool:
    """Return whether a forward of flash-attn reads the keys in parts and merges their outputs."""
    if s.backend == "triton" or s.model.sliding_window is not None:
        return False
    most_keys = CALL_ELEMENTS * s.element_bytes // s.key_row_bytes
    return s.seen_keys > most_keys and s.prefix > 0


def attention_backward(s: TensorSizes) -> Iterator[tuple[str, int]]:
    """Yield the live bytes of an attention backward, without q, o and do."""
    if s.backend == "triton":
        yield "a span", s.query_bytes + s.lse_bytes  # dq, and the row sums of o and do
    elif s.backend in _WHOLE_SPANS:
        yield from _spans_backward(s)
    else:
        yield from _blocks_backward(s)


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


def _blocks_backward(s: TensorSizes) -> Iterator[tuple[str, int]]:
    """Yield the live bytes of a backward in blocks.

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
        keys = first_half(rows)
        later = rows - keys
        # dq and copies of q, o and do of the later half of the rows.
        taken = 4 * s.query_bytes * later // rows + _folded_scratch(s, later, keys)
        yield "half of a square", base + taken + 2 * keys * s.key_row_bytes
    yield "output", s.fp32_query_bytes + s.query_bytes


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
