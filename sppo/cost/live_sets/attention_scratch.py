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
    """Return the bytes that one call takes beside its operands and its results.

    All of them sum the gradient of q in fp32, and hold the row sums of o and do. With grouped
    queries flash-attn 2 makes key gradients of every query head first (``dk_expanded`` in
    ``flash_api.cpp``, torch's copy included); flash-attn 3 and 4 sum those of key heads in fp32
    (``dk_accum`` in ``hopper/flash_api.cpp`` and ``flash_attn/cute/interface.py``), and keep lse
    once more in base 2. cuDNN is called with groups folded into rows or batch, so none of that is
    needed (``dQ_accum`` and ``softmax_sum`` of cudnn-frontend's SDPA backward).

    Args:
        backend: as :mod:`sppo.kernels.attention.choice` names it.
        rows: r.
        keys: t.
        heads: N.
        kv_heads: K.
        head_size: D.
        element_bytes: e.
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
