"""Begins of the documents of a span, as kernels read them that take all in one call.

Such a kernel takes rows and keys of the documents one after another, and for each the sums of the
lengths so far (``cu_seqlens`` of flash-attn, ``cum_seq`` of torch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from sppo.kernels.host_tables import on_device, stream_number


@dataclass(frozen=True, slots=True)
class DocumentOffsets:
    """Documents of one call, on the device that computes it."""

    queries: Tensor
    """int32, where each document's queries begin, and where the last one's end."""
    keys: Tensor
    """Begins of the documents among the keys, likewise."""
    most_queries: int
    """Queries of the longest."""
    most_keys: int
    """Keys of the longest."""


def document_offsets(
    queries: Sequence[int], keys: Sequence[int], device: torch.device
) -> DocumentOffsets:
    """Return the :class:`DocumentOffsets` of documents, cached for the next layer's call.

    Args:
        queries: of each document.
        keys: of each document, at least as many.
        device: of the call.
    """
    return _offsets(tuple(queries), tuple(keys), device, stream_number(device))


@lru_cache(maxsize=16)
def _offsets(
    queries: tuple[int, ...], keys: tuple[int, ...], device: torch.device, stream: int
) -> DocumentOffsets:
    """The tensors are written on ``stream``, and so read there alone."""
    del stream
    both = torch.tensor([list(accumulate(x, initial=0)) for x in (queries, keys)]).to(torch.int32)
    on = on_device(both, device)
    return DocumentOffsets(on[0], on[1], max(queries), max(keys))
