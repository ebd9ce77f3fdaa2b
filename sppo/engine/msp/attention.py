"""Attention of one MSP shard of a unit in one layer, with the prefix sent by the stage's owner.

Forward: the ranks of the MSP group gather the unit's keys and values, the owner stores them, and
the owner sends the prefix to the borrowers, one layer ahead. Backward: the owner sends prefix and
unit again, and every shard computes gradients of all keys and values up to its end. These are
summed at the owner, which already has the sums of later units. Then the gradients of the unit's own
keys and values are complete, and the owner sends them to the shards.

Legend: c tokens of this rank, C tokens of the whole unit, C_k of a shard, T of the prefix and the
unit, N query heads, K key/value heads, D head size; with Ulysses, N and K are one rank's share
inside attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sppo.engine.attention.kv_store import KVStore
from sppo.engine.msp.shard import MspShard, Run
from sppo.kernels.attention.call import AttentionCall
from sppo.kernels.attention.interface import Backend, attention_backward, attention_forward
from sppo.kernels.elementwise import accumulation_dtype
from sppo.offload.held_bytes import HeldBytes
from sppo.parallel.ulysses import UlyssesAllToAll


class MspAttention:
    """:class:`sppo.model.layer.SubsequenceAttention` of one shard in one layer.

    Args:
        shard: Shard whose queries attend.
        heads: Ulysses all-to-all among the ranks over which the shard's tokens are sharded; None
            if they are not.
        unsaved_attention_tokens: For each of these ranks, the number of the shard's last tokens
            without a saved attention output.
        store: KV store of the stage; None on a borrower.
        layer: Index of the layer in the model.
        window: See :class:`sppo.kernels.attention.call.AttentionCall`.
        shape: (K, D) inside attention.
        dtype: Type of keys and values.
        device: Device of all tensors.
        backend: Attention back end.
        borrowed: Counter of the bytes of keys, values and their gradients on a borrower.
    """

    def __init__(
        self,
        shard: MspShard,
        *,
        heads: UlyssesAllToAll | None,
        unsaved_attention_tokens: tuple[int, ...],
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
        self._unsaved_attention_tokens = unsaved_attention_tokens
        self._store, self._layer = store, layer
        self._window, self._shape = window, shape
        self._dtype, self._device = dtype, device
        self._backend: Backend = backend
        self._borrowed = borrowed
        self._kv: tuple[Tensor, Tensor] | None = None

    def prefix(self) -> tuple[Tensor, ...]:
        """Return the prefix's keys and values to broadcast from the owner before forward.

        On the owner, views of its store; on a borrower, buffers to fill; empty without a prefix.
        """
        span = self._shard.span
        if span.start == 0:
            return ()
        if self._store is not None:
            return self._store.prefix(self._layer, self._shard.sequence, end=span.start)
        self._kv = self._empty(span.end)
        k, v = self._kv
        return k[: span.start], v[: span.start]

    def forward(self, q_cND: Tensor, k_cKD: Tensor, v_cKD: Tensor) -> tuple[Tensor, Tensor]:
        """Return (o_cND, lse_Nc) of this rank's tokens, attending to the prefix and all shards."""
        if self._heads is not None:
            q_cND, k_cKD, v_cKD = self._heads.inputs_to_heads(
                q_cND, k_cKD, v_cKD, self._shard.shard_tokens
            )
        self._share(k_cKD, v_cKD)
        found = self._attend(q_cND, tuple(self._shard.shard_tokens))
        self.close()
        return found

    def fetch(self) -> None:
        """Receive keys and values of prefix and unit; the first call of a layer's backward."""
        span = self._shard.span
        if self._store is not None:
            self._kv = self._store.prefix(self._layer, self._shard.sequence, end=span.end)
        else:
            self._kv = self._empty(span.end)
        for tensor in self._kv:
            self._exchange.from_owner(tensor)

    def recompute(self, q_cND: Tensor) -> tuple[Tensor, Tensor]:
        """Return (o_cND, lse_Nc) of the tokens whose attention output was not saved."""
        if self._heads is not None:
            (q_cND,) = self._heads.queries_to_heads([q_cND], self._unsaved_attention_tokens)
        return self._attend(q_cND, self._unsaved_attention_tokens)

    def backward(
        self, do_cND: Tensor, q_cND: Tensor, o_cND: Tensor, lse_Nc: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq_cND, dk_cKD, dv_cKD) of this rank's tokens; the owner adds the prefix's."""
        shard, shard_tokens = self._shard, self._shard.shard_tokens
        if self._heads is not None:
            do_cND, q_cND, o_cND = self._heads.queries_to_heads(
                [do_cND, q_cND, o_cND], shard_tokens
            )
            lse_Nc = self._heads.lse_to_heads(lse_Nc, shard_tokens)
        dq, dk_TKD, dv_TKD = self._gradients(do_cND, q_cND, o_cND, lse_Nc)
        dk_unit, dv_unit = self._complete(dk_TKD, dv_TKD)
        self._let_go(dk_TKD, dv_TKD)
        dk, dv = shard.take(dk_unit), shard.take(dv_unit)
        self.close()
        if self._heads is None:
            return dq, dk, dv
        return self._heads.gradients_to_tokens(dq, dk, dv, shard_tokens)

    def close(self) -> None:
        """Free the layer's keys and values on a borrower."""
        if self._kv is not None and self._store is None:
            self._let_go(*self._kv)
        self._kv = None

    def _share(self, k_cKD: Tensor, v_cKD: Tensor) -> None:
        """Gather the unit's keys and values and append them to the prefix, on every rank."""
        shard, span = self._shard, self._shard.span
        whole = []
        for own in (k_cKD, v_cKD):
            shards = [
                own.contiguous()
                if shard_index == shard.shard_index
                else own.new_empty((sum(b - a for a, b in shard.runs(shard_index)), *own.shape[1:]))
                for shard_index in range(self._exchange.count)
            ]
            self._exchange.all_gather(shards)
            unit = own.new_empty((span.end - span.start, *own.shape[1:]))
            for shard_index, gathered in enumerate(shards):
                shard.put(gathered, shard_index=shard_index, whole_C=unit)
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

    def _attend(self, q_CND: Tensor, shard_tokens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return (o, lse) of the last ``shard_tokens`` tokens of every run, as shards of tokens."""
        q_runs = torch.split(q_CND, list(shard_tokens))
        outputs = [
            attention_forward(self._call(q_run, run), self._backend)
            for q_run, run in zip(q_runs, self._own_runs(), strict=True)
            if q_run.shape[0]
        ]
        o = torch.cat([o for o, _ in outputs])
        lse = torch.cat([lse for _, lse in outputs], dim=1)
        if self._heads is None:
            return o, lse
        return self._heads.queries_to_tokens(o, shard_tokens), self._heads.lse_to_tokens(
            lse, shard_tokens
        )

    def _gradients(
        self, do_CND: Tensor, q_CND: Tensor, o_CND: Tensor, lse_NC: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq of the shard's queries, and their part of dk_TKD and dv_TKD."""
        assert self._kv is not None, "fetch() comes before backward"
        acc_dtype = accumulation_dtype(self._dtype)
        dk, dv = (torch.zeros(x.shape, dtype=acc_dtype, device=x.device) for x in self._kv)
        self._hold(dk, dv)
        shard_tokens = list(self._shard.shard_tokens)
        split = [torch.split(t, shard_tokens) for t in (do_CND, q_CND, o_CND)]
        lse_runs = torch.split(lse_NC, shard_tokens, dim=1)
        dqs = [
            attention_backward(
                self._call(q_run.contiguous(), run),
                do_run.contiguous(),
                o_run.contiguous(),
                lse_run.contiguous(),
                dk_TKD=dk[: run.end],
                dv_TKD=dv[: run.end],
                backend=self._backend,
            )
            for do_run, q_run, o_run, lse_run, run in zip(
                *split, lse_runs, self._own_runs(), strict=True
            )
        ]
        return torch.cat(dqs), dk, dv

    def _complete(self, dk_TKD: Tensor, dv_TKD: Tensor) -> tuple[Tensor, Tensor]:
        """Sum over the shards at the owner; return the complete (dk_CKD, dv_CKD) of the unit."""
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
        return self._shard.runs(self._shard.shard_index)

    def _call(self, q_run: Tensor, run: Run) -> AttentionCall:
        """Return the call of the last queries of a run."""
        assert self._kv is not None, "keys and values are here"
        k, v = (x[: run.end] for x in self._kv)
        documents = tuple(s for s in self._shard.span.document_starts if s < run.end)
        return AttentionCall(q_run, k, v, window=self._window, document_starts=documents)

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
