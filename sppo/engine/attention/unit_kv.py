"""Keys and values that the queries of one unit see in one layer, and their gradients.

Legend: C tokens of the unit, c of them whose keys this rank has computed, T keys of the prefix and
the unit, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sppo.engine.attention.kv_store import KVStore
from sppo.engine.unit import TokenSpan
from sppo.kernels.attention.kv_layout import copy_by_token


class UnitKV(Protocol):
    """Provider of the keys and values of the prefix and the unit.

    Forward calls :meth:`write`, then :meth:`read`. Backward adds to :meth:`gradients`, then calls
    :meth:`complete`.
    """

    @property
    def first_key(self) -> int:
        """Position in the sequence of the first key that :meth:`read` returns."""
        ...

    def write(self, k_cKD: Tensor, v_cKD: Tensor) -> None:
        """Take keys and values of the unit's tokens."""
        ...

    def read(self) -> tuple[Tensor, Tensor]:
        """Return (k_TKD, v_TKD) from :attr:`first_key` to the end of the unit."""
        ...

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return sums (dk_TKD, dv_TKD) to add to, once per unit."""
        ...

    def complete(self, dk_TKD: Tensor, dv_TKD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the complete (dk_cKD, dv_cKD) of the tokens given to :meth:`write`, as copies.

        Args:
            dk_TKD: What :meth:`gradients` returned, with the part of the unit's queries.
            dv_TKD: The same of the values.
        """
        ...

    def release(self) -> None:
        """Free what is not needed after an attention."""
        ...


@dataclass(frozen=True, slots=True)
class StoredKV:
    """:class:`UnitKV` in a :class:`KVStore`, which has the whole prefix."""

    store: KVStore
    layer: int
    sequence: int
    span: TokenSpan

    @property
    def first_key(self) -> int:
        """0: a view of the prefix costs nothing, and kernels read only the keys that are seen."""
        return 0

    def write(self, k_cKD: Tensor, v_cKD: Tensor) -> None:
        """Store keys and values of all tokens of the unit."""
        span = self.span
        self.store.write(
            self.layer,
            self.sequence,
            start=span.start,
            length=span.length,
            k_CKD=k_cKD,
            v_CKD=v_cKD,
        )

    def read(self) -> tuple[Tensor, Tensor]:
        """Return views of the stored keys and values."""
        return self.store.prefix(self.layer, self.sequence, end=self.span.end)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return views of the stored sums, which already have the parts of later units."""
        span = self.span
        return self.store.prefix_gradients(
            self.layer, self.sequence, start=span.start, end=span.end
        )

    def complete(self, dk_TKD: Tensor, dv_TKD: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the unit's slice, as the projections read them."""
        dk, dv = (
            copy_by_token(total[self.span.start :], dtype=self.store.dtype)
            for total in (dk_TKD, dv_TKD)
        )
        return dk, dv

    def release(self) -> None:
        """Do nothing: keys and values are stored until their sequence is released."""
