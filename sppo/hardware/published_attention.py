"""Published rates of attention kernels, by back end, head size and sequence length.

Figures are for bf16 (or fp16) and a causal sequence of the given length, in FLOPs per second over
visible pairs; a backward counts 2.5 times the FLOPs of its forward. The rate of a span of queries
after a prefix is looked up at the causal length whose queries see as many keys on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sppo.hardware.rates import Floats, place

PUBLISHED_BLOCKS = 2048
"""Thread blocks of the published measurements: 16Ki tokens and 16 heads of 128 in all
(FlashAttention-2, section 4.1)."""


@dataclass(frozen=True, slots=True)
class PublishedAttention:
    """Published rates of one attention back end on one kind of device at one head size.

    Attributes:
        backend: Name of the back end in :mod:`sppo.kernels.attention.choice`.
        head_size: Elements of a head.
        lengths: Tokens of each measured causal sequence, rising.
        forward_flops_per_s: Rate of the forward at each length.
        backward_flops_per_s: Rate of the backward at each length.
        source: Publication of the rates, and the hardware that they were measured on.
    """

    backend: str
    head_size: int
    lengths: tuple[int, ...]
    forward_flops_per_s: tuple[float, ...]
    backward_flops_per_s: tuple[float, ...]
    source: str

    def __post_init__(self) -> None:
        rates = (self.forward_flops_per_s, self.backward_flops_per_s)
        rising = all(a < b for a, b in zip(self.lengths, self.lengths[1:], strict=False))
        if not self.lengths or not rising or any(len(r) != len(self.lengths) for r in rates):
            raise ValueError(
                f"published_attention of {self.backend}, head size {self.head_size}: one rate for "
                "each length, lengths rising"
            )
        if min(*self.lengths, *rates[0], *rates[1], self.head_size) <= 0:
            raise ValueError(
                f"published_attention of {self.backend}, head size {self.head_size}: lengths and "
                "rates must be above 0"
            )


def published_rates(
    rows: Sequence[PublishedAttention],
    *,
    head_size: int,
    queries: Floats,
    keys: Floats,
    backward: bool,
) -> Floats:
    """Return the FLOPs per second of attention of spans of `queries` tokens that end at `keys`.

    Rates are interpolated in the logarithms of length and head size; outside the published range
    the nearest rate holds.

    Args:
        rows: Published rates of one back end, one row per head size, smallest first.
        head_size: Elements of a head.
        queries: Tokens of each span.
        keys: Tokens of the sequence up to the end of each span.
        backward: Return the rates of the backward instead of the forward.
    """
    length = np.log(2 * keys - queries)
    by_size = []
    for row in rows:
        rates = row.backward_flops_per_s if backward else row.forward_flops_per_s
        by_size.append(np.interp(length, np.log(row.lengths), np.log(rates)))
    sizes = np.array([row.head_size for row in rows], dtype=np.float64)
    low, weight = place(sizes, np.array(float(head_size)))
    high = min(int(low) + 1, len(rows) - 1)
    mixed: Floats = np.exp(by_size[int(low)] * (1 - weight) + by_size[high] * weight)
    return mixed
