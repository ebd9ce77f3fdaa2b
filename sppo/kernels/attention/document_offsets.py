"""Document offsets of a span, for kernels that compute all documents in one call.

Such a kernel takes the queries and the keys of all documents concatenated, and for each of the two
the cumulative sums of the documents' lengths (``cu_seqlens`` of flash-attn, ``cum_seq`` of torch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DocumentOffsets:
    """Offsets of the documents of one attention call, on the call's device."""

    queries: Tensor
    """Start of each document's queries and the end of the last document's, int32
    ``[documents + 1]``."""
    keys: Tensor
    """Start of each document's keys and the end of the last document's, int32
    ``[documents + 1]``."""
    most_queries: int
    """Largest number of queries of a document."""
    most_keys: int
    """Largest number of keys of a document."""


def document_offsets(
    queries: Sequence[int], keys: Sequence[int], device: torch.device
) -> DocumentOffsets:
    """Return the :class:`DocumentOffsets` of an attention call, cached for the next layer's call.

    Args:
        queries: Number of queries of each document.
        keys: Number of keys of each document, at least its number of queries.
        device: Device of the call.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _offsets(tuple(queries), tuple(keys), device, stream)


@lru_cache(maxsize=16)
def _offsets(
    queries: tuple[int, ...], keys: tuple[int, ...], device: torch.device, stream: int
) -> DocumentOffsets:
    """Return the offsets for calls on ``stream``: the tensors are written on it and read there."""
    del stream
    both = torch.tensor([list(accumulate(x, initial=0)) for x in (queries, keys)]).to(torch.int32)
    if device.type == "cuda":  # a copy from pageable memory would block the host
        both = both.pin_memory()
    on = both.to(device, non_blocking=True)
    return DocumentOffsets(on[0], on[1], max(queries), max(keys))
