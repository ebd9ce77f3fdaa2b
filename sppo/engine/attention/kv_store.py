"""Store of the keys and values of whole sequences, written in place and read as a prefix.

One buffer ``[S, K, D]`` per (layer, sequence) for K and for V, allocated at the first write.
Writing the same positions twice is idempotent, so recomputation needs no second protocol.
Gradients are summed in buffers of the same shape in the accumulation dtype, allocated at a
sequence's first backward. Readers get views of these buffers, lent until the sequence is released;
the next sequence then reuses the buffers, so tensors that must live longer have to be copied.

Forward spans of a sequence ascend without gaps, backward spans descend from its end. When a span
runs backward, every later span has therefore added its part, and the span's own slice is complete.

Legend: S tokens of the sequence, C of a span, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sppo.config.model import ModelConfig
from sppo.kernels.attention.kv_layout import empty_keys
from sppo.kernels.elementwise import accumulation_dtype
from sppo.offload.held_bytes import HeldBytes


@dataclass(slots=True)
class _Entry:
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
        self._entries: dict[tuple[int, int], _Entry] = {}
        self._spare: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self.held = HeldBytes()

    def write(
        self, layer: int, sequence: int, *, start: int, length: int, k_CKD: Tensor, v_CKD: Tensor
    ) -> None:
        """Store k and v at positions ``start..start+C-1`` of a sequence of ``length`` tokens."""
        entry = self._entries.get((layer, sequence))
        if entry is None:
            entry = _Entry(self._new(length, self.dtype), self._new(length, self.dtype))
            self._entries[layer, sequence] = entry
        end = start + k_CKD.shape[0]
        assert start <= entry.written, (
            f"layer {layer}, sequence {sequence}: forward at {start} leaves a gap after "
            f"{entry.written}"
        )
        entry.k[start:end].copy_(k_CKD)
        entry.v[start:end].copy_(v_CKD)
        entry.written = max(entry.written, end)

    def prefix(self, layer: int, sequence: int, *, end: int) -> tuple[Tensor, Tensor]:
        """Return (k_TKD, v_TKD) of positions ``0..end-1``: views, lent until :meth:`release`."""
        entry = self._entries[layer, sequence]
        assert end <= entry.written, f"keys up to {end} are read, {entry.written} are written"
        return entry.k[:end], entry.v[:end]

    def prefix_gradients(
        self, layer: int, sequence: int, *, start: int, end: int
    ) -> tuple[Tensor, Tensor]:
        """Return the sums (dk_TKD, dv_TKD) of positions ``0..end-1`` for the span ``[start, end)``.

        The sums are views, lent until :meth:`release`, which may come in the same backward. Spans
        of a sequence come in descending order; after the caller has added its part, the slice
        ``[start, end)`` is final.
        """
        entry = self._entries[layer, sequence]
        if entry.dk is None or entry.dv is None:
            acc_dtype = accumulation_dtype(self.dtype)
            entry.dk, entry.dv = (self._new(entry.written, acc_dtype).zero_() for _ in range(2))
        expected = entry.written if entry.finished is None else entry.finished
        assert end == expected, (
            f"layer {layer}, sequence {sequence}: backward of [{start}, {end}) but spans down to "
            f"{expected} have run"
        )
        entry.finished = start
        return entry.dk[:end], entry.dv[:end]

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
                    self.held.remove_tensors([buffer])
                    self._spare.setdefault((buffer.shape[0], buffer.dtype), []).append(buffer)

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
        self.held.add_tensors([buffer])
        return buffer
