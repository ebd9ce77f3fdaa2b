"""Store of the keys and values of whole sequences, written in place and read as a prefix.

One buffer ``[S, K, D]`` per (layer, sequence) for K and for V, allocated at the first write.
Gradients are summed in buffers of the same shape in the accumulation dtype, allocated at a
sequence's first backward. Readers get views of these buffers, lent until the sequence is released;
the next sequence then reuses the buffers, so tensors that must live longer have to be copied.

Forward spans of a sequence ascend without gaps, from 0 again once it was released, and backward
spans descend from its end. When a span runs backward, every later span has therefore added its
part, and the span's own slice is complete.

Legend: S tokens of the sequence, C of a unit, T up to its end, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sppo.config.model import ModelConfig
from sppo.engine.unit import TokenSpan
from sppo.kernels.attention.kv_layout import copy_by_token, empty_keys
from sppo.kernels.elementwise import accumulation_dtype
from sppo.offload.retained import HeldBytes


@dataclass(slots=True)
class Entry:
    """Buffers of one (layer, sequence) and the progress of its forward and backward."""

    k: Tensor
    v: Tensor
    written: int = 0
    finished: int | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None


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
        self._spare: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self.held = HeldBytes()

    def entry(self, layer: int, sequence: int, *, length: int) -> Entry:
        """Return the buffers of a sequence of ``length`` tokens in a layer, new ones at first."""
        if (layer, sequence) not in self._entries:
            k, v = self._new(length, self.dtype), self._new(length, self.dtype)
            self._entries[layer, sequence] = Entry(k, v)
            self._lengths[sequence] = length
        return self._entries[layer, sequence]

    def restore(self, layer: int, sequence: int, k_CKD: Tensor, v_CKD: Tensor) -> None:
        """Write keys and values of a sequence's next unit again, after they left the device."""
        length = self._lengths[sequence]
        start = self.entry(layer, sequence, length=length).written
        span = TokenSpan(start, start + k_CKD.shape[0], length)
        StoredKV(self, layer, sequence, span).write(k_CKD, v_CKD)

    def gradients(self, entry: Entry) -> tuple[Tensor, Tensor]:
        """Return the sums of gradients of an entry, zeros at first."""
        if entry.dk is None or entry.dv is None:
            tokens, dtype = entry.written, accumulation_dtype(self.dtype)
            entry.dk, entry.dv = (self._new(tokens, dtype).zero_() for _ in range(2))
        return entry.dk, entry.dv

    def release(self, sequence: int, *, layers: Iterable[int]) -> None:
        """Free the buffers of some layers for a sequence whose backward is complete or not needed.

        The buffers are kept for other layers and for the next sequence of the same length, so that
        no step has to allocate again.
        """
        for layer in layers:
            entry = self._entries.pop((layer, sequence), None)
            if entry is None:
                continue
            for buffer in (entry.k, entry.v, entry.dk, entry.dv):
                if buffer is not None:
                    if self._poison:
                        buffer.fill_(float("nan"))
                    self.held.add(-buffer.nbytes)
                    self._spare.setdefault((buffer.shape[0], buffer.dtype), []).append(buffer)

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

    def _new(self, length: int, dtype: torch.dtype) -> Tensor:
        # Spare buffers of another length are unlikely to be used again: free them.
        self._spare = {key: spare for key, spare in self._spare.items() if key[0] == length}
        spare = self._spare.get((length, dtype))
        buffer = spare.pop() if spare else self.empty(length, dtype)
        self.held.add(buffer.nbytes)
        return buffer


class StoredKV:
    """Keys and values of the prefix and a unit in one layer, in a store that has all of them.

    Forward calls :meth:`write`, then :meth:`read`. Backward adds to :meth:`gradients`, then calls
    :meth:`complete`. All tensors that are read are views, lent until the sequence is released,
    which may come in the same backward.

    Args:
        store: Store of the rank.
        layer: Index of the layer in the model.
        sequence: Index of the sequence in its step.
        span: Positions of the unit.
    """

    first_key = 0
    """Position in the sequence of the first key that :meth:`read` returns. A view of the prefix
    costs nothing, and kernels read only the keys that are seen."""

    def __init__(self, store: KVStore, layer: int, sequence: int, span: TokenSpan) -> None:
        self.store, self.layer, self.sequence, self.span = store, layer, sequence, span

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
        """Return keys and values of positions ``0..end-1``."""
        entry = self._entry
        assert end <= entry.written, f"keys up to {end} are read, {entry.written} are written"
        return entry.k[:end], entry.v[:end]

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return the sums (dk_TKD, dv_TKD) to add to, which have the parts of later units.

        Called once per unit, in descending order of the units of a sequence; after the caller has
        added its part, the slice of the unit is final.
        """
        entry, start, end = self._entry, self.span.start, self.span.end
        dk, dv = self.store.gradients(entry)
        expected = entry.written if entry.finished is None else entry.finished
        assert end == expected, (
            f"layer {self.layer}, sequence {self.sequence}: backward of [{start}, {end}) but spans "
            f"down to {expected} have run"
        )
        entry.finished = start
        return dk[:end], dv[:end]

    def complete(self, dk_TKD: Tensor, dv_TKD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the complete (dk_CKD, dv_CKD) of the tokens given to :meth:`write`, as copies.

        Args:
            dk_TKD: What :meth:`gradients` returned, with the part of the unit's queries.
            dv_TKD: The same of the values.
        """
        start, dtype = self.span.start, self.store.dtype
        return copy_by_token(dk_TKD[start:], dtype=dtype), copy_by_token(
            dv_TKD[start:], dtype=dtype
        )

    def release(self) -> None:
        """Free what is not needed after an attention: here nothing, until the sequence is done."""

    @property
    def _entry(self) -> Entry:
        return self.store.entry(self.layer, self.sequence, length=self.span.length)
