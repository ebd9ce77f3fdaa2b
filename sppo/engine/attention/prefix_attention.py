"""Attention of the queries that one rank has of a unit, over the unit's whole prefix.

A rank has queries in one or several *runs* of consecutive positions: the whole subsequence, a shard
of it (MSP), or one run for each rank with which it exchanges tokens for heads (Ulysses). Keys and
values come from a :class:`StoredKV`.

Legend: c tokens of this rank, C tokens of all runs, T keys of the prefix and the unit, N query
heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sppo.engine.attention.kv_store import StoredKV
from sppo.engine.unit import Run
from sppo.kernels.attention.call import AttentionCall
from sppo.kernels.attention.interface import attention_backward, attention_forward
from sppo.parallel.ulysses import UlyssesAllToAll


@dataclass(frozen=True, slots=True)
class PrefixAttention:
    """:class:`sppo.model.attention_mixer.SubsequenceAttention` of this rank's tokens.

    Attributes:
        kv: Keys and values of the prefix and the unit.
        runs: Positions of the queries in the sequence, one run for each rank over which they are
            sharded.
        unsaved_tokens: Number of last tokens of each run whose attention output is not saved.
        heads: All-to-all among these ranks; None if this rank has the tokens of all runs.
        window: Number of keys that a query sees, its own included; None for all.
        document_starts: Ascending positions; a query sees its own document only.
        scale: Factor of the scores; None for ``1/sqrt(D)``.
        offload: Function that takes K and V of the unit in forward as ``offloaded``; None if they
            stay.
    """

    kv: StoredKV
    runs: tuple[Run, ...]
    unsaved_tokens: tuple[int, ...] = ()
    heads: UlyssesAllToAll | None = None
    window: int | None = None
    document_starts: tuple[int, ...] = (0,)
    scale: float | None = None
    offload: Callable[..., None] | None = None

    @property
    def lacks_keys(self) -> bool:
        """True if :meth:`provide` must be called before keys and values are read."""
        return self.kv.lacks_keys

    def forward(self, q_cND: Tensor, k_cKD: Tensor, v_cKD: Tensor) -> tuple[Tensor, Tensor]:
        """Provide k and v of the unit to all later units, and return (o_cND, lse_Nc)."""
        if self.heads is not None:
            q_cND, k_cKD, v_cKD = self.heads.to_heads(
                [q_cND], [k_cKD, v_cKD], shard_tokens=self._tokens
            )
        self.kv.write(k_cKD, v_cKD)
        if self.offload is not None:
            self.offload(offloaded={"keys": k_cKD, "values": v_cKD})
        found = self._attend(q_cND, self._tokens)
        self.kv.release()
        return found

    def provide(self, k_cKD: Tensor, v_cKD: Tensor) -> None:
        """Provide k and v of the unit again, without attention."""
        if self.heads is not None:
            k_cKD, v_cKD = self.heads.to_heads([], [k_cKD, v_cKD], shard_tokens=self._tokens)
        self.kv.write(k_cKD, v_cKD)

    def recompute(self, q_cND: Tensor) -> tuple[Tensor, Tensor]:
        """Return (o_cND, lse_Nc) of this rank's tokens whose output was not saved."""
        if self.heads is not None:
            (q_cND,) = self.heads.to_heads([q_cND], shard_tokens=self.unsaved_tokens)
        return self._attend(q_cND, self.unsaved_tokens)

    def backward(
        self, do_cND: Tensor, q_cND: Tensor, o_cND: Tensor, lse_Nc: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq_cND, dk_cKD, dv_cKD) of this rank's tokens; add those of the prefix."""
        if self.heads is not None:
            do_cND, q_cND, o_cND = self.heads.to_heads(
                [do_cND, q_cND, o_cND], shard_tokens=self._tokens
            )
            lse_Nc = self.heads.lse_to_heads(lse_Nc, self._tokens)
        dk_TKD, dv_TKD = self.kv.gradients()
        dq = self._query_gradients(do_cND, q_cND, o_cND, lse_Nc, dk_TKD, dv_TKD)
        dk, dv = self.kv.complete(dk_TKD, dv_TKD)
        del dk_TKD, dv_TKD
        self.kv.release()
        if self.heads is not None:
            dq, dk, dv = self.heads.to_tokens([dq], [dk, dv], shard_tokens=self._tokens)
        return dq, dk, dv

    def _attend(self, q_CND: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return (o, lse) of the last ``tokens`` of every run, for this rank's tokens."""
        outputs = [
            attention_forward(self._call(q_CND[rows], end)) for rows, end in self._spans(tokens)
        ]
        o, lse = outputs[0]
        if len(outputs) > 1:
            o = torch.cat([o for o, _ in outputs])
            lse = torch.cat([lse for _, lse in outputs], dim=1)
        if self.heads is None:
            return o, lse
        (o,) = self.heads.to_tokens([o], shard_tokens=tokens)
        return o, self.heads.lse_to_tokens(lse, tokens)

    def _query_gradients(
        self,
        do_CND: Tensor,
        q_CND: Tensor,
        o_CND: Tensor,
        lse_NC: Tensor,
        dk_TKD: Tensor,
        dv_TKD: Tensor,
    ) -> Tensor:
        """Return dq of all runs; add to the gradients of the keys and values that they see."""
        dqs = []
        for rows, end in self._spans(self._tokens):
            keys = end - self.kv.first_key
            dq = attention_backward(
                self._call(q_CND[rows], end),
                do_CND[rows],
                o_CND[rows],
                lse_NC[:, rows].contiguous(),
                dk_TKD=dk_TKD[:keys],
                dv_TKD=dv_TKD[:keys],
            )
            dqs.append(dq)
        return dqs[0] if len(dqs) == 1 else torch.cat(dqs)

    def _call(self, q_CND: Tensor, end: int) -> AttentionCall:
        """Return the call of queries of which the last is at position ``end - 1``."""
        k, v = (x[: end - self.kv.first_key] for x in self.kv.read())
        documents = self._documents(end)
        return AttentionCall(
            q_CND, k, v, window=self.window, document_starts=documents, scale=self.scale
        )

    def _documents(self, end: int) -> tuple[int, ...]:
        """Return where documents start among the keys that are read, up to position ``end``."""
        first = self.kv.first_key
        return (0, *(start - first for start in self.document_starts if first < start < end))

    def _spans(self, tokens: Sequence[int]) -> list[tuple[slice, int]]:
        """Return the last ``tokens`` of every run, adjacent ones together, without empty ones.

        Returns:
            Pairs (rows among these tokens, position in the sequence behind the last of them).
        """
        spans: list[Run] = []
        for run, count in zip(self.runs, tokens, strict=True):
            start = run.end - count
            if spans and spans[-1].end == start:
                spans[-1] = Run(spans[-1].start, run.end)
            elif count:
                spans.append(Run(start, run.end))
        rows, found = 0, []
        for span in spans:
            found.append((slice(rows, rows + span.end - span.start), span.end))
            rows += span.end - span.start
        return found

    @property
    def _tokens(self) -> tuple[int, ...]:
        """Number of tokens of each run."""
        return tuple(run.end - run.start for run in self.runs)
