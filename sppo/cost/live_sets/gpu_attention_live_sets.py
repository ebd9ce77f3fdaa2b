"""Memory that attention allocates beyond its operands, with each back end of a GPU.

The functions yield live bytes with a name; the largest counts
(:mod:`sppo.cost.live_sets.working_set`).
"""

from __future__ import annotations

from collections.abc import Iterator

from sppo.cost.layer import ACCUMULATION_BYTES as _WIDE
from sppo.cost.live_sets.attention_block_sizes import Block, BlockKind, largest_blocks
from sppo.cost.live_sets.attention_scratch import backward_scratch_bytes
from sppo.cost.live_sets.tensor_sizes import LiveSet, TensorSizes
from sppo.units import MIB

SPAN_KEYS = 16384
"""Most keys of one backward call of flash-attn, as in
:mod:`sppo.kernels.attention.rectangle_attention`."""
CALL_ELEMENTS = 1 << 30
"""Most elements of the keys of one forward call of flash-attn, as there."""
_WHOLE_SPANS = frozenset(("flash_attn_2", "flash_attn_3", "flash_attn_4", "torch_flash"))
"""Back ends that compute a span of queries and its keys in one call instead of blocks."""
TILE_BYTES = 64 * MIB
"""Most bytes of one tile of scores, as in :mod:`sppo.kernels.attention.torch_blocks`."""


def attention_forward(s: TensorSizes) -> Iterator[LiveSet]:
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
    merged, output = s.fp32_query_bytes + s.lse_bytes, s.query_bytes + s.lse_bytes
    for block in largest_blocks(s):
        yield block.name, s.query_bytes + merged + output + _forward_scratch(s, block)
    yield "output", merged + s.query_bytes


def _merges_spans(s: TensorSizes) -> bool:
    """Return whether a forward of flash-attn reads the keys in parts and merges their outputs."""
    if s.model.sliding_window is not None:
        return False
    most_keys = CALL_ELEMENTS * s.element_bytes // s.key_row_bytes
    return s.seen_keys > most_keys and s.prefix > 0


def attention_backward(s: TensorSizes) -> Iterator[LiveSet]:
    """Yield the live bytes of an attention backward, without q, o and do."""
    if s.backend in _WHOLE_SPANS:
        yield from _spans_backward(s)
    else:
        yield from _blocks_backward(s)


def _spans_backward(s: TensorSizes) -> Iterator[LiveSet]:
    """Yield the live bytes of one flash-attn call per part of the keys, and of the sum of dq."""
    rows = s.rows
    if s.model.sliding_window is not None:
        keys, is_cut = min(s.seen_keys, rows + s.model.sliding_window), False
    else:  # The causal part is not cut.
        keys = min(s.seen_keys, max(SPAN_KEYS, rows))
        is_cut = s.seen_keys > keys
    part = (
        s.query_bytes + 2 * keys * s.key_row_bytes + _scratch(s, rows, keys, kv_heads=s.key_heads)
    )
    yield "a part of the keys", (s.fp32_query_bytes if is_cut else 0) + part
    if is_cut:
        yield "sum of dq", s.fp32_query_bytes + s.query_bytes


def _blocks_backward(s: TensorSizes) -> Iterator[LiveSet]:
    """Yield the live bytes of a backward in blocks.

    Live are q, o and do by head, the sum of dq, and dq, dk and dv of a block.
    """
    base = 3 * s.query_bytes + s.fp32_query_bytes
    rows = s.rows
    for block in largest_blocks(s):
        # Copies of some rows of q, o and do, which are put together by key head.
        is_part = block.kind is BlockKind.FULL and block.rows < rows
        copies = 3 * _row_bytes(s, block) if is_part else 0
        yield block.name, base + copies + _block_backward(s, block)
    yield "output", s.fp32_query_bytes + s.query_bytes


def _forward_scratch(s: TensorSizes, block: Block) -> int:
    """Return the bytes that a forward of a block takes beyond its output."""
    if s.backend != "torch_blocks":
        return 0
    # A tile of scores, with its exponentials or with keys that are repeated for every query head.
    tile, keys = _tile_bytes(s, block), _WIDE * _key_elements(s, block) * _repeats(s, block)
    return _operand_bytes(s, block) + tile + max(tile, keys)


def _block_backward(s: TensorSizes, block: Block) -> int:
    """Return the bytes of a backward of a block: dq, dk, dv and what the back end allocates."""
    keys = _key_elements(s, block)
    if s.backend != "torch_blocks":
        # k and v are repeated for every query head.
        repeated = 0 if block.kind is BlockKind.FULL else 2 * keys * s.element_bytes
        results = _row_bytes(s, block) + 2 * keys * s.element_bytes
        scratch = _scratch(s, block.rows, block.keys, kv_heads=s.heads)
        return results + repeated + scratch
    # Results in fp32, weights and gradients of a tile of scores, and a product of these with keys
    # that are repeated, or one like dk.
    results = _row_bytes(s, block) * _WIDE // s.element_bytes + 2 * keys * _WIDE
    tile = _tile_bytes(s, block)
    product = keys * _WIDE * _repeats(s, block) + tile * s.model.head_dim // block.keys
    return _operand_bytes(s, block) + results + 2 * tile + max(product, keys * _WIDE)


def _row_bytes(s: TensorSizes, block: Block) -> int:
    """Return the bytes of q, o, or a gradient of one of them, for the rows of a block."""
    return s.query_bytes * block.rows // s.rows


def _key_elements(s: TensorSizes, block: Block) -> int:
    """Return the elements of k, v, or a gradient of one of them, for the keys of a block."""
    heads = s.key_heads if block.kind is BlockKind.FULL else s.heads
    return block.keys * heads * s.model.head_dim


def _operand_bytes(s: TensorSizes, block: Block) -> int:
    """Return the bytes of k and v in fp32, if they are in half precision, and of a band's mask."""
    mask = block.rows * block.keys * s.element_bytes * (block.kind is BlockKind.BAND)
    return mask + 2 * _WIDE * _key_elements(s, block) * s.is_half


def _repeats(s: TensorSizes, block: Block) -> bool:
    """Return whether products copy the keys of a block for every query head of a key head."""
    return block.kind is not BlockKind.FULL and s.heads > s.key_heads and not s.is_half


def _tile_bytes(s: TensorSizes, block: Block) -> int:
    """Return the bytes of a tile of scores in fp32."""
    return min(TILE_BYTES, _WIDE * s.heads * block.rows * block.keys)


def _scratch(s: TensorSizes, rows: int, keys: int, *, kv_heads: int) -> int:
    """Return the bytes that one backward call of the back end allocates inside."""
    return backward_scratch_bytes(
        s.backend,
        rows=rows,
        keys=keys,
        heads=s.heads,
        kv_heads=kv_heads,
        head_size=s.model.head_dim,
        element_bytes=s.element_bytes,
    )
