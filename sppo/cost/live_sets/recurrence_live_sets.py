"""Live sets of the recurrence of linear attention: its convolution and its rule.

They follow :mod:`sppo.model.recurrence` and :mod:`sppo.kernels.chunked_rule`; fla-core takes less.
Tensors of a tile of tokens are in fp32, those of chunks with all rows of the last one. Backward
holds what autograd saves of a tile, most while it differentiates the scan, or before that the
scores, which a row has with all rows of its chunk.

Legend: T tokens of a tile, c of a chunk, J key heads, H value heads, K and V sizes of a key and of
a value, M = 2 J K + H V channels of the convolution.
"""

from __future__ import annotations

from sppo.cost.linear_attention.states import state_bytes
from sppo.cost.live_sets.tensor_sizes import TensorSizes
from sppo.cost.tiles import CHUNK_TOKENS, RECURRENCE_TOKENS
from sppo.cost.workload import ACCUMULATION_BYTES

_NUMBERS = 8
"""Tensors with a number for each token and value head in forward: decays and their sums, and
strengths; backward has as many gradients."""


def recurrence_forward(s: TensorSizes) -> int:
    """Return the bytes of the outputs, and of a tile of a forward."""
    own = s.linear.of_rank(s.workload.sequence_parallel_degree)
    keys, values, heads = own.key_size, own.value_size, own.value_heads
    # Both sides of the triangular system, whose own matrix is beside its decays; v, delta, k.
    of_head = 2 * (keys + values) + 2 * CHUNK_TOKENS + 2 * values + keys + _NUMBERS
    of_inputs = 3 * own.conv_width // 2 if s.is_half else own.conv_width + 2 * own.keys_width
    scan = heads * of_head + 2 * own.keys_width + of_inputs
    # The convolution, and q and k before and after their scaling; then all of them rounded.
    before = 2 * own.conv_width + 3 * own.keys_width + s.is_half * 3 * own.conv_width // 2
    tile = max(_tile_bytes(s, scan, states=1), _tile_bytes(s, before, states=0))
    return s.values_bytes + tile


def recurrence_backward(s: TensorSizes) -> int:
    """Return the bytes of the gradients, of states between tiles, and of a tile of a backward."""
    own = s.linear.of_rank(s.workload.sequence_parallel_degree)
    keys, values, heads = own.key_size, own.value_size, own.value_heads
    # The convolution; k in chunks, and gradients of q and k; decays, and their gradients.
    shared = 3 * own.conv_width + 3 * own.keys_width + 2 * heads * _NUMBERS
    # Inputs of the convolution are cast, and the outputs are rounded.
    shared += (own.conv_width - heads * values // 2) * s.is_half
    scan = heads * (4 * keys + 6 * values + 4 * CHUNK_TOKENS) + own.key_heads * CHUNK_TOKENS
    scores = heads * (3 * keys + 6 * values + 6 * CHUNK_TOKENS) + 3 * own.key_heads * CHUNK_TOKENS
    tile = max(_tile_bytes(s, shared + scan, states=3), _tile_bytes(s, shared + scores, states=1))
    between = max(1, -(-s.rows // RECURRENCE_TOKENS) - 1)
    state = state_bytes(s.model, ACCUMULATION_BYTES, s.workload.sequence_parallel_degree)
    return s.linear_input_bytes + between * state + tile


def _tile_bytes(s: TensorSizes, of_token: int, *, states: int) -> int:
    """Return the bytes of tensors of a tile in fp32.

    Args:
        s: Sizes of the subsequence.
        of_token: Elements of all tensors with a row for each token.
        states: Tensors with the states before all chunks and after the last.
    """
    own = s.linear.of_rank(s.workload.sequence_parallel_degree)
    chunks = -(-min(s.rows, RECURRENCE_TOKENS) // CHUNK_TOKENS)
    # Beside the states of chunks, those before and behind the tile.
    of_states = (states * (chunks + 1) + 2) * own.value_heads * own.key_size * own.value_size
    return (chunks * CHUNK_TOKENS * of_token + of_states) * ACCUMULATION_BYTES
