"""Keys and values of one MSP shard of a unit in one layer, with the prefix sent by the owner.

Forward: the ranks of the MSP group gather the unit's keys and values, the owner stores them, and
the owner sends the prefix to the borrowers, one layer ahead. Backward: the owner sends prefix and
unit again, and every shard computes gradients of all keys and values up to its end. These are
summed at the owner, which already has the sums of later units. Then the gradients of the unit's own
keys and values are complete, and the owner sends them to the shards. Of a layer with a sliding
window, only the keys that the unit's queries see are sent.

Legend: c tokens of this rank's shard, C tokens of the whole unit, T keys of the prefix and the
unit, K key/value heads, D head size; with Ulysses, K is one rank's share.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sppo.engine.attention.kv_store import KVStore, StoredKV
from sppo.engine.msp.shard import MspShard
from sppo.kernels.elementwise import accumulation_dtype


class SharedKV(StoredKV):
    """Keys and values of one shard in one layer; the owner of the stage stores them.

    Args:
        shard: Shard whose queries attend.
        layer: Index of the layer in the model.
        window: Number of keys that a query sees, its own included; None for all.
        store: KV store of this rank; the owner's has the prefix.
    """

    def __init__(
        self,
        shard: MspShard,
        *,
        layer: int,
        window: int | None,
        store: KVStore,
    ) -> None:
        super().__init__(store, layer, shard.sequence, shard.span, window=window)
        self._shard, self._exchange = shard, shard.exchange
        self._kv: tuple[Tensor, Tensor] | None = None

    def prefix(self) -> tuple[Tensor, ...]:
        """Return the prefix's keys and values to broadcast from the owner before forward.

        On the owner, views of its store; on a borrower, buffers to fill; empty without a prefix.
        """
        if self.prefix_keys == 0:
            return ()
        if not self._exchange.is_owner:
            self._kv = k, v = self._empty(self.store.dtype)
            return k[: self.prefix_keys], v[: self.prefix_keys]
        return self.read_until(self.span.start)

    def write(self, k_cKD: Tensor, v_cKD: Tensor) -> None:
        """Gather the unit's keys and values from all shards, behind those of the prefix."""
        k_CKD, v_CKD = self._gathered(k_cKD), self._gathered(v_cKD)
        if self._exchange.is_owner:
            super().write(k_CKD, v_CKD)
            self._kv = super().read()
            return
        if self._kv is None:
            self._kv = self._empty(self.store.dtype)
        for tensor, unit in zip(self._kv, (k_CKD, v_CKD), strict=True):
            tensor[self.prefix_keys :] = unit

    def fetch(self) -> None:
        """Receive keys and values of prefix and unit; the first call of a layer's backward."""
        is_owner = self._exchange.is_owner
        self._kv = super().read() if is_owner else self._empty(self.store.dtype)
        for tensor in self._kv:
            self._exchange.from_owner(tensor)

    def read(self) -> tuple[Tensor, Tensor]:
        """Return (k_TKD, v_TKD), after :meth:`write` or :meth:`fetch`."""
        assert self._kv is not None, "keys and values are here"
        return self._kv

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return zeros: sums of this shard alone."""
        dk, dv = self._empty(accumulation_dtype(self.store.dtype))
        return dk.zero_(), dv.zero_()

    def complete(self, dk_TKD: Tensor, dv_TKD: Tensor) -> tuple[Tensor, Tensor]:
        """Sum over the shards at the owner; return the complete (dk_cKD, dv_cKD) of the shard."""
        totals = super().gradients() if self._exchange.is_owner else None
        found = []
        for index, part in enumerate((dk_TKD, dv_TKD)):
            self._exchange.to_owner(part)
            unit = part.new_empty(part[self.prefix_keys :].shape, dtype=self.store.dtype)
            if totals is not None:
                totals[index].add_(part)
                unit.copy_(totals[index][self.prefix_keys :])
            self._exchange.from_owner(unit)
            found.append(unit)
        if totals is not None:
            self.keep(*totals)
        dk, dv = (self._shard.take(unit) for unit in found)
        return dk, dv

    def release(self) -> None:
        """Free the layer's keys and values on a borrower."""
        self._kv = None

    def _gathered(self, own_cKD: Tensor) -> Tensor:
        """Return the keys (or values) of the whole unit, in order."""
        shard, tail = self._shard, own_cKD.shape[1:]
        shards = [
            own_cKD.contiguous()
            if shard_index == shard.shard_index
            else own_cKD.new_empty((shard.tokens_of(shard_index), *tail))
            for shard_index in range(self._exchange.count)
        ]
        self._exchange.all_gather(shards)
        unit = own_cKD.new_empty((shard.span.end - shard.span.start, *tail))
        for shard_index, gathered in enumerate(shards):
            shard.put(gathered, shard_index=shard_index, whole_C=unit)
        return unit

    def _empty(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return two new tensors ``[T, K, D]``."""
        tokens = self.span.end - self.first_key
        return self.store.empty(tokens, dtype), self.store.empty(tokens, dtype)
