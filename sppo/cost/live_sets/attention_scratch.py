"""Memory that attention back ends for GPUs allocate inside a backward call.

Legend: r rows (queries), t keys, N query heads, K key/value heads, D head size, e element bytes.
"""

from __future__ import annotations

_FP32 = 4
_ROWS_UNIT, _HEAD_UNIT = 128, 32


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
    row_sums = padded * heads * _FP32
    if backend == "cudnn":
        return rows * heads * (head_size + 1) * _FP32
    taken = padded * heads * size * _FP32 + row_sums
    if backend in ("flash_attn_3", "flash_attn_4"):
        taken += row_sums
        return taken + (2 * keys * kv_heads * size * _FP32 if heads > kv_heads else 0)
    return taken + (2 * keys * heads * head_size * element_bytes if heads > kv_heads else 0)
