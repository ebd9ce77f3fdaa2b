"""Keys and values of a layer with a sliding window, kept in part: those that later units see.

Of every unit but the last, the store keeps the last rows, W - 1 at most, one unit after another. A
unit reads copies of the rows that it sees, and its own rows behind them. Backward writes its own
rows again, from the layer's input. A unit that is shorter than W - 1 is kept whole, so that the
rows before a unit are consecutive, whatever number of units they come from.

Legend: C tokens of a unit, T from the first key that the unit sees to its end, W window, K
key/value heads, D head size.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from sppo.engine.attention.kv_store import Entry, StoredKV


class PartialKV(StoredKV):
    """Keys and values that a unit sees in a layer with a window, in a store that has few of them.

    Forward and backward call :meth:`write`, then :meth:`read`, then :meth:`release`.
    """

    _seen: tuple[Tensor, Tensor] | None = None

    @property
    def lacks_keys(self) -> bool:
        """True if the unit's keys and values must be written again before they are read."""
        return self._seen is None

    def write(self, k_CKD: Tensor, v_CKD: Tensor) -> None:
        """Put keys and values of the unit behind those that it sees; forward keeps the last."""
        entry, (start, end) = self._entry, (self.span.start, self.span.end)
        before, seen = entry.rows_before[start], []
        own = 0 if end == self.span.length else min(end - start, self._most_rows)
        for kept, x_CKD in ((entry.k, k_CKD), (entry.v, v_CKD)):
            x_TKD = self.store.empty(end - self.first_key, self.store.dtype)
            x_TKD[: self.prefix_keys] = kept[before - self.prefix_keys : before]
            x_TKD[self.prefix_keys :] = x_CKD
            if start == entry.written:
                kept[before : before + own] = x_TKD[x_TKD.shape[0] - own :]
            seen.append(x_TKD)
        if start == entry.written:
            entry.rows_before[end], entry.written = before + own, end
        self._seen = seen[0], seen[1]

    def read(self) -> tuple[Tensor, Tensor]:
        """Return (k_TKD, v_TKD) from the first key that the unit sees to its end."""
        assert self._seen is not None, "keys and values were written"
        return self._seen

    def release(self) -> None:
        """Free keys and values of the unit."""
        self._seen = None

    @property
    def _most_rows(self) -> int:
        """Most rows of a unit that later units see."""
        assert self.window is not None, "layers without a window keep all rows"
        return self.window - 1

    @property
    def _entry(self) -> Entry:
        lengths = (end - start for start, end in pairwise(self.span.boundaries[:-1]))
        return self.store.entry(
            self.layer,
            self.sequence,
            length=self.span.length,
            rows=sum(min(tokens, self._most_rows) for tokens in lengths),
            window=self.window,
        )
