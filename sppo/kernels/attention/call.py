"""Call of attention of one subsequence over its whole prefix.

Legend: C queries (the last C of T positions), T keys, N query heads, K key/value heads, D head
size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """Causal attention of a span, bottom-right aligned: query i sees keys ``<= T - C + i``.

    Attributes:
        q_CND: Queries of the span.
        k_TKD: Keys from the start of the sequence to the end of the span; K divides N.
        v_TKD: Values, shaped like ``k_TKD``.
        window: Number of keys that a query sees, its own included; None for all.
        document_starts: Ascending positions in ``[0, T)``; a query sees its own document only.
        scale: Factor of the scores; None for ``1/sqrt(D)``.

    Raises:
        ValueError: Shapes that do not fit together.
    """

    q_CND: Tensor
    k_TKD: Tensor
    v_TKD: Tensor
    window: int | None = None
    document_starts: tuple[int, ...] = (0,)
    scale: float | None = None

    def __post_init__(self) -> None:
        q, k, v = self.q_CND.shape, self.k_TKD.shape, self.v_TKD.shape
        if self.heads % self.kv_heads or q[2] != k[2] or k != v:
            raise ValueError(
                f"q {tuple(q)} does not fit k {tuple(k)}, v {tuple(v)}: heads must be a multiple "
                "of key/value heads, head sizes and k, v shapes equal"
            )
        if not 1 <= self.num_queries <= self.num_keys:
            raise ValueError(
                f"a span of {self.num_queries} queries cannot end at key {self.num_keys}"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window {self.window} hides a query from itself; use at least 1")

    @property
    def num_queries(self) -> int:
        """C, the tokens of the span."""
        return self.q_CND.shape[0]

    @property
    def num_keys(self) -> int:
        """T, the keys from the start of the sequence to the end of the span."""
        return self.k_TKD.shape[0]

    @property
    def heads(self) -> int:
        """N, the query heads."""
        return self.q_CND.shape[1]

    @property
    def kv_heads(self) -> int:
        """K, the key/value heads."""
        return self.k_TKD.shape[1]

    @property
    def factor(self) -> float:
        """Factor of the scores."""
        return self.q_CND.shape[2] ** -0.5 if self.scale is None else self.scale
