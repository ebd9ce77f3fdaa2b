"""Memory that attention allocates beyond its operands, with each back end of a GPU.

The functions yield live bytes with a name; the largest counts
(:mod:`sppo.cost.live_sets.working_set`).

Legend: r rows (queries), t keys, N query heads, K key/value heads, D head size, e element bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from sppo.cost.live_sets.attention_block_sizes import Block, largest_blocks
from sppo.cost.live_sets.tensor_sizes import LiveSet, TensorSizes
from sppo.cost.tiles import MAX_BACKWARD_KEYS, MAX_FORWARD_ELEMENTS, SCORES_TILE_BYTES
from sppo.cost.workload import ACCUMULATION_BYTES as _WIDE

_WHOLE_SPANS = frozenset(("flash_attn_2", "flash_attn_3", "flash_attn_4", "torch_flash"))
"""Back ends that compute a span of queries and its keys in one call instead of blocks."""
_ROWS_UNIT, _HEAD_UNIT = 128, 32


def attention_forward(s: TensorSizes) -> Iterator[LiveSet]:
    """Yield the live bytes of an attention forward, without q, k and v."""
    # The output of a span or a block, and the running output of several of them.
    output, merged = s.query_bytes + s.lse_bytes, s.fp32_query_bytes + s.lse_bytes
    if s.backend in _WHOLE_SPANS:
        yield "a span", output + merged * _merges_spans(s)
        return
    for block in largest_blocks(s):
        # Queries by head, too.
        yield block.name, s.query_bytes + merged + output + _forward_scratch(block)


def _merges_spans(s: TensorSizes) -> bool:
    """Return whether a forward of flash-attn reads the keys in parts and merges their outputs."""
    if s.kind.window is not None:
        return False
    most_keys = MAX_FORWARD_ELEMENTS * s.element_bytes // s.key_row_bytes
    return s.seen_keys > most_keys and s.prefix > 0


def attention_backward(s: TensorSizes) -> Iterator[LiveSet]:
    """Yield the live bytes of an attention backward, without q, o and do."""
    if s.backend in _WHOLE_SPANS:
        yield "a part of the keys", _span_backward(s)
        return
    # q, o and do by head, and the sum of dq.
    base = 3 * s.query_bytes + s.fp32_query_bytes
    for block in largest_blocks(s):
        copies = 3 * block.row_bytes(s.element_bytes) * block.is_part  # of q, o and do
        yield block.name, base + copies + _block_backward(block)


def _span_backward(s: TensorSizes) -> int:
    """Return the bytes of one flash-attn call per part of the keys, and of the sum of dq."""
    if s.kind.window is not None:
        keys, is_cut = min(s.seen_keys, s.rows + s.kind.window), False
    else:  # The causal part is not cut.
        keys = min(s.seen_keys, max(MAX_BACKWARD_KEYS, s.rows))
        is_cut = s.seen_keys > keys
    part = s.query_bytes + 2 * keys * s.key_row_bytes
    part += _scratch(s, s.rows, keys, kv_heads=s.key_heads)
    return part + s.fp32_query_bytes * is_cut


def _forward_scratch(block: Block) -> int:
    """Return the bytes that a forward of a block takes beyond its output."""
    if block.s.backend != "torch_blocks":
        return 0
    # A tile of scores, with its exponentials or with keys that are repeated for every query head.
    tile = _tile_bytes(block)
    return _operand_bytes(block) + tile + max(tile, block.key_bytes(_WIDE) * _repeats(block))


def _block_backward(block: Block) -> int:
    """Return the bytes of a backward of a block: dq, dk, dv and what the back end allocates."""
    s = block.s
    if s.backend != "torch_blocks":
        results = block.row_bytes(s.element_bytes) + 2 * block.key_bytes(s.element_bytes)
        # k and v are repeated for every query head.
        repeated = 2 * block.key_bytes(s.element_bytes) * (not block.is_full)
        return results + repeated + _scratch(s, block.rows, block.keys, kv_heads=s.heads)
    # Results in fp32, weights and gradients of a tile of scores, and a product of these with keys
    # that are repeated, or one like dk.
    keys, tile = block.key_bytes(_WIDE), _tile_bytes(block)
    results = block.row_bytes(_WIDE) + 2 * keys
    product = keys * _repeats(block) + tile * s.model.head_dim // block.keys
    return _operand_bytes(block) + results + 2 * tile + max(product, keys)


def _operand_bytes(block: Block) -> int:
    """Return the bytes of k and v in fp32, if they are in half precision, and of a band's mask."""
    s = block.s
    return block.mask_elements * s.element_bytes + 2 * block.key_bytes(_WIDE) * s.is_half


def _repeats(block: Block) -> bool:
    """Return whether products copy the keys of a block for every query head of a key head."""
    return not block.is_full and block.s.group > 1 and not block.s.is_half


def _tile_bytes(block: Block) -> int:
    """Return the bytes of a tile of scores in fp32."""
    return min(SCORES_TILE_BYTES, _WIDE * block.s.heads * block.rows * block.keys)


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


def backward_scratch_bytes(
    backend: str,
    *,
    rows: int,
    keys: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    element_bytes: int,
) -> int:
    """Return the bytes that one backward call allocates beyond its operands and results.

    All back ends sum the gradient of q in fp32, and hold the row sums of o * do. With grouped
    queries, flash-attn 2 and torch's copy of it first form key gradients for every query head
    (``dk_expanded`` in ``flash_api.cpp``); flash-attn 3 and 4 sum key gradients of key heads in
    fp32 (``dk_accum`` in ``hopper/flash_api.cpp`` and ``flash_attn/cute/interface.py``), and hold a
    second lse in base 2. cuDNN is called with groups folded into rows or batch, so it needs only
    the sums of q's gradient and of rows (``dQ_accum`` and ``softmax_sum`` of cudnn-frontend's SDPA
    backward).

    Args:
        backend: Name of the back end in :mod:`sppo.kernels.attention.choice`.
        rows: Queries (r).
        keys: Keys (t).
        heads: Query heads (N).
        kv_heads: Key/value heads (K).
        head_size: Elements of a head (D).
        element_bytes: Bytes of an element of the compute dtype (e).
    """
    padded = -(-rows // _ROWS_UNIT) * _ROWS_UNIT
    size = -(-head_size // _HEAD_UNIT) * _HEAD_UNIT
    row_sums = padded * heads * _WIDE
    if backend == "cudnn":
        return rows * heads * (head_size + 1) * _WIDE
    taken = padded * heads * size * _WIDE + row_sums
    if backend in ("flash_attn_3", "flash_attn_4"):
        taken += row_sums
        return taken + (2 * keys * kv_heads * size * _WIDE if heads > kv_heads else 0)
    return taken + (2 * keys * heads * head_size * element_bytes if heads > kv_heads else 0)
