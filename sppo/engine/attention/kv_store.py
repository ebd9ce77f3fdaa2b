"""Store of the keys and values of whole sequences, written in place and read as a prefix.

One buffer ``[S, K, D]`` per (layer, sequence) for K and for V, allocated at the first write.
Gradients are summed in buffers of the same shape in the accumulation dtype, allocated at a
sequence's first backward. Readers get views of these buffers, lent until the sequence is released;
the next sequence then reuses the buffers, so tensors that must live longer have to be copied.

In a layer with a sliding window, a unit reads only the keys that its queries see. It adds to their
gradients in memory of its own. The store keeps the sums of the keys before the unit, W - 1 at most.

Forward spans of a sequence ascend without gaps, from 0 again once it was released, and backward
spans descend from its end. When a span runs backward, every later span has therefore added its
part, and the span's own slice is complete.

Legend: S tokens of the sequence, C of a unit, T from the first key that a unit sees to its end, W
window, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sppo.config.model import ModelConfig
from sppo.engine.unit import TokenSpan
from sppo.kernels.attention.kv_layout import copy_by_token, empty_keys
from sppo.kernels.elementwise import accumulation_dtype
from sppo.offload.retained import HeldBytes


class BufferKind(NamedTuple):
    """Use of a buffer: buffers of one kind have equally many rows if sequences are cut alike."""

    window: int | None = None
    """Window of the layer; None for rows of whole sequences, whatever they hold."""
    has_gradients: bool = False
    """True if a layer with a window keeps gradients in the buffer, and not keys or values."""


@dataclass(slots=True)
class Entry:
    """Buffers of one (layer, sequence) and the progress of its forward and backward."""

    k: Tensor
    v: Tensor
    kind: BufferKind
    """Use of `k` and `v`."""
    written: int = 0
    """Tokens of the sequence that forward has written."""
    rows_before: dict[int, int] = field(default_factory=lambda: {0: 0})
    """Rows of `k` in front of those of each unit, by the unit's first position, if `k` has only
    rows that later units see."""
    finished: int | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    gradient_kind: BufferKind = BufferKind()
    """Use of `dk` and `dv`."""
    gradient_rows: int = 0
    """First rows of `dk` that have sums of later units, in a layer with a window."""


class KVStore:
    """K, V and their gradients for every layer of a rank and every sequence in flight.

    Args:
        model: Model configuration.
        dtype: Type of K and V.
        device: Device of all buffers.
        heads: Number of key/value heads of this rank; None for all.
        sent: Whether prefixes are sent to other ranks, and must be contiguous in memory.
        poison: Overwrite the buffers of a released sequence with NaN, so that a late reader gets
            NaN instead of another sequence's values.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        heads: int | None = None,
        sent: bool = False,
        poison: bool = False,
    ) -> None:
        self._poison = poison
        self._tail = (model.kv_heads if heads is None else heads, model.head_dim)
        self.dtype, self._device, self._sent = dtype, device, sent
        self._entries: dict[tuple[int, int], Entry] = {}
        self._lengths: dict[int, int] = {}
        self._spare: dict[tuple[BufferKind, int, torch.dtype], list[Tensor]] = {}
        self.held = HeldBytes()

    def entry(
        self,
        layer: int,
        sequence: int,
        *,
        length: int,
        rows: int | None = None,
        window: int | None = None,
    ) -> Entry:
        """Return the buffers of a sequence in a layer, new ones at first.

        Args:
            layer: Index of the layer in the model.
            sequence: Index of the sequence in its step.
            length: Tokens of the sequence.
            rows: Tokens whose K and V are kept; None for all.
            window: Window of the layer if not all are kept.
        """
        if (layer, sequence) not in self._entries:
            kind, rows = BufferKind(window), length if rows is None else rows
            k, v = (self._new(kind, rows, self.dtype) for _ in range(2))
            self._entries[layer, sequence] = Entry(k, v, kind)
            self._lengths[sequence] = length
        return self._entries[layer, sequence]

    def restore(self, layer: int, sequence: int, k_CKD: Tensor, v_CKD: Tensor) -> None:
        """Write keys and values of a sequence's next unit again, after they left the device."""
        length = self._lengths[sequence]
        start = self.entry(layer, sequence, length=length).written
        span = TokenSpan(start, start + k_CKD.shape[0], (0, length))
        StoredKV(self, layer, sequence, span).write(k_CKD, v_CKD)

    def gradients(
        self, entry: Entry, *, rows: int | None = None, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the sums of gradients of an entry, zeros at first.

        Args:
            entry: Buffers of a sequence in a layer.
            rows: Tokens whose sums are kept; None for all.
            window: Window of the layer if not all are kept.
        """
        if entry.dk is None or entry.dv is None:
            rows, dtype = entry.written if rows is None else rows, accumulation_dtype(self.dtype)
            entry.gradient_kind = BufferKind(window, has_gradients=window is not None)
            entry.dk, entry.dv = (
                self._new(entry.gradient_kind, rows, dtype).zero_() for _ in range(2)
            )
        return entry.dk, entry.dv

    def release(self, sequence: int, *, layers: Iterable[int]) -> None:
        """Free the buffers of some layers for a sequence whose backward is complete or not needed.

        The buffers are kept for other layers and for the next sequence that is cut alike, so that
        no step has to allocate again.
        """
        for layer in layers:
            entry = self._entries.pop((layer, sequence), None)
            if entry is None:
                continue
            kinds = (entry.kind,) * 2 + (entry.gradient_kind,) * 2
            buffers = (entry.k, entry.v, entry.dk, entry.dv)
            for kind, buffer in zip(kinds, buffers, strict=True):
                if buffer is not None:
                    if self._poison:
                        buffer.fill_(float("nan"))
                    self.held.add(-buffer.nbytes)
                    key = kind, buffer.shape[0], buffer.dtype
                    self._spare.setdefault(key, []).append(buffer)

    def close(self) -> None:
        """Free all buffers, which no sequence may use any more."""
        self._entries.clear()
        self._spare.clear()

    def empty(self, tokens: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised ``[tokens, K, D]`` tensor that the store does not keep."""
        return empty_keys(tokens, *self._tail, dtype=dtype, device=self._device, sent=self._sent)

    @property
    def row_bytes(self) -> int:
        """Bytes of K of one token and layer; V has as many."""
        heads, head_size = self._tail
        return heads * head_size * self.dtype.itemsize

    @property
    def num_sequences(self) -> int:
        """Number of sequences with K and V in the store."""
        return len({sequence for _, sequence in self._entries})

    def _new(self, kind: BufferKind, rows: int, dtype: torch.dtype) -> Tensor:
        # Spare buffers with other numbers of rows are unlikely to be used again: free them.
        self._spare = {
            key: spare for key, spare in self._spare.items() if key[0] != kind or key[1] == rows
        }
        spare = self._spare.get((kind, rows, dtype))
        buffer = spare.pop() if spare else self.empty(rows, dtype)
        self.held.add(buffer.nbytes)
        return buffer


class StoredKV:
    """Keys and values that a unit sees in one layer, in a store that has those of all tokens.

    Forward calls :meth:`write`, then :meth:`read`. Backward adds to :meth:`gradients`, then calls
    :meth:`complete`. Keys and values that are read are views, lent until the sequence is released,
    which may come in the same backward.

    Args:
        store: Store of the rank.
        layer: Index of the layer in the model.
        sequence: Index of the sequence in its step.
        span: Positions of the unit.
        window: Number of keys that a query sees, its own included; None for all.
    """

    def __init__(
        self,
        store: KVStore,
        layer: int,
        sequence: int,
        span: TokenSpan,
        *,
        window: int | None = None,
    ) -> None:
        self.store, self.layer, self.sequence, self.span = store, layer, sequence, span
        self.window = window
        self.prefix_keys = span.start if window is None else min(span.start, window - 1)
        """Number of keys before the unit that its queries see."""
        self.first_key = span.start - self.prefix_keys
        """Position in the sequence of the first key that :meth:`read` returns."""

    @property
    def lacks_keys(self) -> bool:
        """True if the unit's keys and values must be written again before they are read."""
        return False

    def write(self, k_CKD: Tensor, v_CKD: Tensor) -> None:
        """Store keys and values of all tokens of the unit."""
        entry, start, end = self._entry, self.span.start, self.span.end
        assert start == entry.written, (
            f"layer {self.layer}, sequence {self.sequence}: forward at {start}, where "
            f"{entry.written} tokens are written"
        )
        entry.k[start:end].copy_(k_CKD)
        entry.v[start:end].copy_(v_CKD)
        entry.written = end

    def read(self) -> tuple[Tensor, Tensor]:
        """Return (k_TKD, v_TKD) from :attr:`first_key` to the end of the unit."""
        return self.read_until(self.span.end)

    def read_until(self, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values from :attr:`first_key` to position ``end - 1``."""
        entry = self._entry
        assert end <= entry.written, f"keys up to {end} are read, {entry.written} are written"
        return entry.k[self.first_key : end], entry.v[self.first_key : end]

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return the sums (dk_TKD, dv_TKD) to add to, which have the parts of later units.

        Called once per unit, in descending order of the units of a sequence; after the caller has
        added its part, the slice of the unit is final.
        """
        entry, start, end = self._entry, self.span.start, self.span.end
        expected = entry.written if entry.finished is None else entry.finished
        assert end == expected, (
            f"layer {self.layer}, sequence {self.sequence}: backward of [{start}, {end}) but spans "
            f"down to {expected} have run"
        )
        entry.finished = start
        if self.window is None:
            dk, dv = self.store.gradients(entry)
            return dk[:end], dv[:end]
        # The last unit comes first, and sees no fewer keys before it than any other.
        kept = self.store.gradients(entry, rows=self.prefix_keys, window=self.window)
        later, tokens = entry.gradient_rows, end - self.first_key
        sums = self.store.empty(tokens, kept[0].dtype), self.store.empty(tokens, kept[1].dtype)
        for sum_TKD, of_later in zip(sums, kept, strict=True):
            sum_TKD[: tokens - later] = 0
            sum_TKD[tokens - later :] = of_later[:later]
        return sums

    def complete(self, dk_TKD: Tensor, dv_TKD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the complete (dk_CKD, dv_CKD) of the tokens given to :meth:`write`, as copies.

        Args:
            dk_TKD: What :meth:`gradients` returned, with the part of the unit's queries.
            dv_TKD: The same of the values.
        """
        self.keep(dk_TKD, dv_TKD)
        dk, dv = (
            copy_by_token(sum_TKD[self.prefix_keys :], dtype=self.store.dtype)
            for sum_TKD in (dk_TKD, dv_TKD)
        )
        return dk, dv

    def keep(self, dk_TKD: Tensor, dv_TKD: Tensor) -> None:
        """Keep the gradients of the keys before the unit, to which the unit has added its part."""
        if self.window is None:
            return  # they are views of what is kept
        entry, rows = self._entry, self.prefix_keys
        for kept, sum_TKD in zip(self.store.gradients(entry), (dk_TKD, dv_TKD), strict=True):
            kept[:rows] = sum_TKD[:rows]
        entry.gradient_rows = rows

    def release(self) -> None:
        """Free what is not needed after an attention: here nothing, until the sequence is done."""

    @property
    def _entry(self) -> Entry:
        return self.store.entry(self.layer, self.sequence, length=self.span.length)
