"""Attention over a prefix by kernels of whole rectangles, such as flash-attn.

A rectangle kernel supports a causal mask that is aligned at the bottom right, a sliding window and
grouped queries, so forward is one call per document, or one call for all documents if the kernel
takes their offsets. Some kernels count elements of the keys in 32 bits: a prefix of more than
:data:`MAX_FORWARD_ELEMENTS` is read in parts, whose outputs are merged. Backward returns dk and dv
for all keys (several times their size with grouped queries): a long prefix is therefore processed
in parts, each with the *global* o and lse, so that the gradients of a part are exact, and each part
is added to the totals immediately.

Legend: C queries, T keys, N query heads, K key/value heads, D head size; c queries and t keys of a
rectangle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from sppo.cost.tiles import MAX_BACKWARD_KEYS, MAX_FORWARD_ELEMENTS
from sppo.kernels.attention.blocks import documents_in_span
from sppo.kernels.attention.call import AttentionCall
from sppo.kernels.attention.merged_output import MergedOutput


@dataclass(frozen=True, slots=True)
class DocumentOffsets:
    """Offsets of the documents of one attention call, on the call's device.

    A kernel that computes all documents in one call takes their queries and keys concatenated, and
    for each of the two the cumulative sums of the documents' lengths (``cu_seqlens`` of flash-attn,
    ``cum_seq`` of torch).
    """

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


@dataclass(frozen=True, slots=True, eq=False)
class RectangleCall:
    """Attention of one rectangle, or of several, concatenated along rows and keys."""

    q_cND: Tensor
    k_tKD: Tensor
    v_tKD: Tensor
    causal: bool
    """Whether a query sees no later keys; aligned at the bottom right."""
    window: int | None
    scale: float
    documents: DocumentOffsets | None = None
    """Offsets of several rectangles; None for one."""


class RectangleKernel(Protocol):
    """Kernel of one rectangle of attention."""

    @property
    def takes_documents(self) -> bool:
        """True if calls may have ``documents``."""
        ...

    def forward(self, call: RectangleCall) -> tuple[Tensor, Tensor]:
        """Return (o_cND, lse_Nc in fp32)."""
        ...

    def backward(
        self, call: RectangleCall, do_cND: Tensor, o_cND: Tensor, lse_Nc: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) like q, k, v; ``o`` and ``lse`` are those over all keys."""
        ...


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Rectangle of queries ``[q0, q1)`` of the span and keys ``[k0, k1)`` of the sequence."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool
    documents: tuple[Rectangle, ...] = ()
    """Rectangles, in order, of which this one is the union; empty for a single rectangle."""


def rectangles(
    num_queries: int,
    num_keys: int,
    *,
    window: int | None,
    document_starts: tuple[int, ...],
    max_keys: int | None = None,
) -> Iterator[Rectangle]:
    """Yield the rectangles of each document with a query in the span; the last one is causal.

    Without a window, keys before the span are cut into rectangles of at most ``max_keys`` keys. All
    causal rectangles together have at most ``max_keys`` keys, or as many keys as there are queries
    if that is more. With a window, each document has one rectangle, without the keys that no query
    sees: its keys are at most the queries plus the window.
    """
    start = num_keys - num_queries
    for first, last in documents_in_span(start, num_keys, document_starts):
        begin = max(start, first)
        q0, q1 = begin - start, last - start
        if window is not None:
            yield Rectangle(q0, q1, max(first, begin - window + 1), last, causal=True)
            continue
        cut = first if max_keys is None else max(first, min(begin, num_keys - max_keys))
        for k0 in range(first, cut, max_keys or 1):
            yield Rectangle(q0, q1, k0, min(k0 + (max_keys or 1), cut), causal=False)
        yield Rectangle(q0, q1, cut, last, causal=True)


def joined(parts: Iterable[Rectangle]) -> list[Rectangle]:
    """Return ``parts`` with all causal rectangles of the span, which are adjacent, joined last."""
    parts = list(parts)
    causal = tuple(part for part in parts if part.causal)
    if len(causal) == 1:
        return parts
    first, last = causal[0], causal[-1]
    all_of_them = Rectangle(first.q0, last.q1, first.k0, last.k1, causal=True, documents=causal)
    return [*(part for part in parts if not part.causal), all_of_them]


@dataclass(frozen=True, slots=True)
class RectangleAttention:
    """Back end of attention over a :class:`RectangleKernel`."""

    kernel: RectangleKernel
    max_backward_keys: int | None = None
    """Most keys of one backward call; None for :data:`MAX_BACKWARD_KEYS`."""
    max_forward_keys: int | None = None
    """Most keys of one forward call; None for those of :data:`MAX_FORWARD_ELEMENTS`."""

    def forward(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Return (o_CND, lse_NC), with one call per document or one call for all documents."""
        max_keys = self.max_forward_keys or MAX_FORWARD_ELEMENTS // call.k_TKD[0].numel()
        parts = self._rectangles(call, max_keys=max_keys)
        if len(parts) == 1:
            return self.kernel.forward(_operands(parts[0], call))
        if all(r.causal for r in parts):
            outputs = [self.kernel.forward(_operands(r, call)) for r in parts]
            return torch.cat([o for o, _ in outputs]), torch.cat([lse for _, lse in outputs], dim=1)
        merged = MergedOutput(call.q_CND.transpose(0, 1), kv_heads=call.heads)
        for r in reversed(parts):  # causal rectangles cover all rows, so they come first
            o_cND, lse_Nc = self.kernel.forward(_operands(r, call))
            rows = slice(r.q0, r.q1)
            merged.add(rows, o_cND.transpose(0, 1).unsqueeze(1), lse_Nc.unsqueeze(1))
            del o_cND, lse_Nc  # freed before the next part is computed
        return merged.result(call.q_CND.dtype)

    def backward(
        self,
        call: AttentionCall,
        do_CND: Tensor,
        o_CND: Tensor,
        lse_NC: Tensor,
        *,
        dk_TKD: Tensor,
        dv_TKD: Tensor,
    ) -> Tensor:
        """Return dq_CND, computed by rectangles; add to ``dk_TKD`` and ``dv_TKD``."""
        parts = self._rectangles(call, max_keys=self.max_backward_keys or MAX_BACKWARD_KEYS)
        dq_CND: Tensor | None = None
        for r in parts:
            rows, keys = slice(r.q0, r.q1), slice(r.k0, r.k1)
            dq, dk, dv = self.kernel.backward(
                _operands(r, call), do_CND[rows], o_CND[rows], lse_NC[:, rows].contiguous()
            )
            dk_TKD[keys].add_(dk)
            dv_TKD[keys].add_(dv)
            if len(parts) == 1:
                return dq
            if dq_CND is None:
                dq_CND = torch.zeros(do_CND.shape, dtype=lse_NC.dtype, device=do_CND.device)
            dq_CND[rows].add_(dq)
            del dq, dk, dv  # freed before the next part is computed
        assert dq_CND is not None, "every query sees at least itself"
        return dq_CND.to(call.q_CND.dtype)

    def _rectangles(self, call: AttentionCall, *, max_keys: int) -> list[Rectangle]:
        parts = rectangles(
            call.num_queries,
            call.num_keys,
            window=call.window,
            document_starts=call.document_starts,
            max_keys=max_keys,
        )
        return joined(parts) if self.kernel.takes_documents else list(parts)


def _operands(part: Rectangle, call: AttentionCall) -> RectangleCall:
    """Return the kernel's call for one rectangle, or for joined ones, with their offsets."""
    keys = slice(part.k0, part.k1)
    documents = None
    if part.documents:
        device = call.q_CND.device
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        sizes = [(one.q1 - one.q0, one.k1 - one.k0) for one in part.documents]
        queries, of_keys = zip(*sizes, strict=True)
        documents = _offsets(queries, of_keys, device, stream)
    return RectangleCall(
        call.q_CND[part.q0 : part.q1],
        call.k_TKD[keys],
        call.v_TKD[keys],
        part.causal,
        call.window,
        call.factor,
        documents,
    )


@lru_cache(maxsize=16)
def _offsets(
    queries: tuple[int, ...], keys: tuple[int, ...], device: torch.device, stream: int
) -> DocumentOffsets:
    """Return the offsets of documents with so many queries and keys, cached for the next layer.

    They are for calls on ``stream``: the tensors are written on it and read there.
    """
    del stream
    both = torch.tensor([list(accumulate(x, initial=0)) for x in (queries, keys)]).to(torch.int32)
    if device.type == "cuda":  # a copy from pageable memory would block the host
        both = both.pin_memory()
    on = both.to(device, non_blocking=True)
    return DocumentOffsets(on[0], on[1], max(queries), max(keys))
