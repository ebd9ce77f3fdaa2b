"""Attention of one (layer, sequence, span) through the KV store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from sppo.engine.attention.kv_store import KVStore
from sppo.engine.unit import TokenSpan
from sppo.kernels.attention.call import AttentionCall
from sppo.kernels.attention.interface import Backend, attention_backward, attention_forward
from sppo.kernels.attention.kv_layout import copy_by_token


@dataclass(frozen=True, slots=True)
class KVCacheAttention:
    """:class:`sppo.model.layer.SubsequenceAttention` over a :class:`KVStore`."""

    store: KVStore
    layer: int
    sequence: int
    span: TokenSpan
    window: int | None
    backend: Backend = "auto"
    offload: Callable[[dict[str, Tensor]], None] | None = None
    """Function that offloads K and V of the subsequence in forward; None if they stay."""

    def forward(self, q_CND: Tensor, k_CKD: Tensor, v_CKD: Tensor) -> tuple[Tensor, Tensor]:
        """Store K and V of the subsequence and return (o_CND, lse_NC) of its queries."""
        self.store.write(
            self.layer,
            self.sequence,
            start=self.span.start,
            length=self.span.length,
            k_CKD=k_CKD,
            v_CKD=v_CKD,
        )
        if self.offload is not None:
            self.offload({"keys": k_CKD, "values": v_CKD})
        return self.recompute(q_CND)

    def recompute(self, q_CND: Tensor) -> tuple[Tensor, Tensor]:
        """Return (o, lse) of the last queries of the span, recomputed from the stored K and V."""
        return attention_forward(self._call(q_CND), self.backend)

    def backward(
        self, do_CND: Tensor, q_CND: Tensor, o_CND: Tensor, lse_NC: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of the subsequence; add dk and dv of its prefix to the store."""
        start, end = self.span.start, self.span.end
        call = self._call(q_CND)
        dk, dv = self.store.prefix_gradients(self.layer, self.sequence, start=start, end=end)
        dq = attention_backward(
            call, do_CND, o_CND, lse_NC, dk_TKD=dk, dv_TKD=dv, backend=self.backend
        )
        return (
            dq,
            copy_by_token(dk[start:], dtype=call.k_TKD.dtype),
            copy_by_token(dv[start:], dtype=call.v_TKD.dtype),
        )

    def _call(self, q_CND: Tensor) -> AttentionCall:
        k, v = self.store.prefix(self.layer, self.sequence, end=self.span.end)
        return AttentionCall(q_CND, k, v, window=self.window, document_starts=self._documents())

    def _documents(self) -> tuple[int, ...]:
        return tuple(start for start in self.span.document_starts if start < self.span.end)
