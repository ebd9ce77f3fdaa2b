"""Attention of one shard of a unit, in one layer: keys and values come from the owner of the stage.

Forward: the shards gather their keys and values, the owner stores them, and what came before the
unit goes to the borrowers, one layer at a time. Backward: the owner sends all of them again, every
shard adds its part to the gradients of all keys before it, and these are added up at the owner,
where those of later units wait already. Then the unit's own are complete and go to the shards.

Legend: c tokens here, C of the whole unit, C_k of a shard, T of the prefix with the unit, N query
heads, K key/value heads, D head size; with Ulysses N and K are a rank's share inside attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sppo.engine.kv_store import KVStore
from sppo.engine.msp.shard import MspShard, Run
from sppo.kernels.attention.interface import Backend, attention_backward, attention_forward
from sppo.kernels.elementwise import accumulation_dtype
from sppo.offload.held_bytes import HeldBytes
from sppo.parallel.ulysses import UlyssesAllToAll


class MspAttention:
    """:class:`sppo.model.layer.SubsequenceAttention` of one shard in one layer.

    Args:
        shard: whose queries attend.
        heads: exchange with the ranks over which this shard's tokens are sharded; None where they
            are not sharded.
        missing: of this shard's tokens on each of those ranks, how many last ones have no saved
            attention output.
        store: keys and values of the stage; None on a borrower.
        layer: index in the model.
        window: see :func:`sppo.kernels.attention.interface.attention_forward`.
        shape: (K, D) inside attention.
        backend: of the kernel.
        borrowed: counts the keys and values of other ranks that a borrower holds.
    """

    def __init__(
        self,
        shard: MspShard,
        *,
        heads: UlyssesAllToAll | None,
        missing: tuple[int, ...],
        store: KVStore | None,
        layer: int,
        window: int | None,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        backend: Backend,
        borrowed: HeldBytes,
    ) -> None:
        self._shard, self._exchange, self._heads = shard, shard.exchange, heads
        self._missing, self._store, self._layer = missing, store, layer
        self._window, self._shape = window, shape
        self._dtype, self._device = dtype, device
        self._backend: Backend = backend
        self._borrowed = borrowed
        self._kv: tuple[Tensor, Tensor] | None = None

    def prefix(self) -> tuple[Tensor, ...]:
        """Receive, before the layer's forward, what the owner sends of the unit's prefix."""
        span = self._shard.span
        if span.start == 0:
            return ()
        if self._store is not None:
            return self._store.prefix(self._layer, self._shard.sequence, end=span.start)
        self._kv = self._empty(span.end)
        k, v = self._kv
        return k[: span.start], v[: span.start]

    def forward(self, q_cND: Tensor, k_cKD: Tensor, v_cKD: Tensor) -> tuple[Tensor, Tensor]:
        """Attend with this rank's tokens to the prefix and all shards; (o_cND, lse_Nc)."""
        if self._heads is not None:
            q_cND, k_cKD, v_cKD = self._heads.inputs_to_heads(
                q_cND, k_cKD, v_cKD, self._shard.parts
            )
        self._share(k_cKD, v_cKD)
        found = self._attend(q_cND, tuple(self._shard.parts))
        self.close()
        return found

    def fetch(self) -> None:
        """Get keys and values up to the unit, in backward before anything else of the layer."""
        span = self._shard.span
        if self._store is not None:
            self._kv = self._store.prefix(self._layer, self._shard.sequence, end=span.end)
        else:
            self._kv = self._empty(span.end)
        for tensor in self._kv:
            self._exchange.from_owner(tensor)

    def recompute(self, q_cND: Tensor) -> tuple[Tensor, Tensor]:
        """Recompute attention for the tokens whose output was not saved; (o_cND, lse_Nc)."""
        if self._heads is not None:
            (q_cND,) = self._heads.queries_to_heads([q_cND], self._missing)
        return self._attend(q_cND, self._missing)

    def backward(
        self, do_cND: Tensor, q_cND: Tensor, o_cND: Tensor, lse_Nc: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq_cND, dk_cKD, dv_cKD) of this rank's tokens; the owner sums the prefix's."""
        shard, parts = self._shard, self._shard.parts
        if self._heads is not None:
            do_cND, q_cND, o_cND = self._heads.queries_to_heads([do_cND, q_cND, o_cND], parts)
            lse_Nc = self._heads.lse_to_heads(lse_Nc, parts)
        dq, dk_TKD, dv_TKD = self._gradients(do_cND, q_cND, o_cND, lse_Nc)
        dk_unit, dv_unit = self._complete(dk_TKD, dv_TKD)
        self._let_go(dk_TKD, dv_TKD)
        dk, dv = shard.take(dk_unit), shard.take(dv_unit)
        self.close()
        if self._heads is None:
            return dq, dk, dv
        return self._heads.gradients_to_tokens(dq, dk, dv, parts)

    def close(self) -> None:
        """Free keys and values of the layer."""
        if self._kv is not None and self._store is None:
            self._let_go(*self._kv)
        self._kv = None

    def _share(self, k_cKD: Tensor, v_cKD: Tensor) -> None:
        """Put the unit's keys and values behind what came before it, on every rank."""
        shard, span = self._shard, self._shard.span
        whole = []
        for own in (k_cKD, v_cKD):
            parts = [
                own.contiguous()
                if place == shard.place
                else own.new_empty((sum(b - a for a, b in shard.runs(place)), *own.shape[1:]))
                for place in range(self._exchange.count)
            ]
            self._exchange.all_gather(parts)
            unit = own.new_empty((span.end - span.start, *own.shape[1:]))
            for place, part in enumerate(parts):
                shard.put(part, place=place, whole_C=unit)
            whole.append(unit)
        sequence = shard.sequence
        if self._store is not None:
            self._store.write(
                self._layer,
                sequence,
                start=span.start,
                length=span.length,
                k_CKD=whole[0],
                v_CKD=whole[1],
            )
            self._kv = self._store.prefix(self._layer, sequence, end=span.end)
        else:
            if self._kv is None:
                self._kv = self._empty(span.end)
            for tensor, unit in zip(self._kv, whole, strict=True):
                tensor[span.start :] = unit

    def _attend(self, q_CND: Tensor, parts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return (o, lse) of the last ``parts`` tokens of every run, as tokens of this rank."""
        assert self._kv is not None, "keys and values are here"
        k, v = self._kv
        outputs = []
        for q_run, run in zip(torch.split(q_CND, list(parts)), self._own_runs(), strict=True):
            if q_run.shape[0]:
                outputs.append(
                    attention_forward(
                        q_run,
                        k[: run.end],
                        v[: run.end],
                        window=self._window,
                        document_starts=self._documents(run.end),
                        backend=self._backend,
                    )
                )
        o = torch.cat([o for o, _ in outputs])
        lse = torch.cat([lse for _, lse in outputs], dim=1)
        if self._heads is None:
            return o, lse
        return self._heads.queries_to_tokens(o, parts), self._heads.lse_to_tokens(lse, parts)

    def _gradients(
        self, do_CND: Tensor, q_CND: Tensor, o_CND: Tensor, lse_NC: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk_TKD, dv_TKD) of this shard's queries."""
        assert self._kv is not None, "fetch() comes before backward"
        k, v = self._kv
        acc_dtype = accumulation_dtype(self._dtype)
        dk, dv = (torch.zeros(k.shape, dtype=acc_dtype, device=k.device) for _ in range(2))
        self._hold(dk, dv)
        parts = list(self._shard.parts)
        split = [torch.split(t, parts) for t in (do_CND, q_CND, o_CND)]
        lse_runs = torch.split(lse_NC, parts, dim=1)
        dqs = [
            attention_backward(
                do_run.contiguous(),
                q_run.contiguous(),
                k[: run.end],
                v[: run.end],
                o_run.contiguous(),
                lse_run.contiguous(),
                dk_TKD=dk[: run.end],
                dv_TKD=dv[: run.end],
                window=self._window,
                document_starts=self._documents(run.end),
                backend=self._backend,
            )
            for do_run, q_run, o_run, lse_run, run in zip(
                *split, lse_runs, self._own_runs(), strict=True
            )
        ]
        return torch.cat(dqs), dk, dv

    def _complete(self, dk_TKD: Tensor, dv_TKD: Tensor) -> tuple[Tensor, Tensor]:
        """Return (dk_CKD, dv_CKD) of the unit, complete: those of later units are at the owner."""
        span, sums = self._shard.span, None
        if self._store is not None:
            sums = self._store.prefix_gradients(
                self._layer, self._shard.sequence, start=span.start, end=span.end
            )
        found = []
        for index, part in enumerate((dk_TKD, dv_TKD)):
            self._exchange.to_owner(part)
            unit = part.new_empty(part[span.start :].shape, dtype=self._dtype)
            if sums is not None:
                sums[index].add_(part)
                unit.copy_(sums[index][span.start :])
            self._exchange.from_owner(unit)
            found.append(unit)
        return found[0], found[1]

    def _own_runs(self) -> tuple[Run, ...]:
        return self._shard.runs(self._shard.place)

    def _documents(self, end: int) -> tuple[int, ...]:
        return tuple(start for start in self._shard.span.document_starts if start < end)

    def _empty(self, tokens: int) -> tuple[Tensor, Tensor]:
        k, v = (
            torch.empty((tokens, *self._shape), dtype=self._dtype, device=self._device)
            for _ in range(2)
        )
        self._hold(k, v)
        return k, v

    def _hold(self, *tensors: Tensor) -> None:
        if self._store is None:
            self._borrowed.add_tensors(tensors)

    def _let_go(self, *tensors: Tensor) -> None:
        if self._store is None:
            self._borrowed.remove_tensors(tensors)
