"""Predicted seconds of parts of samples, tabulated so that many packings can be tried quickly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sppo.cost.layer import attention_seconds, head_parts, layer_parts, summed
from sppo.cost.layer_kinds import kinds_of_model
from sppo.cost.packed_sequence import SampleParts
from sppo.cost.workload import Workload
from sppo.hardware.rates import Floats

_POINTS_PER_DOUBLING = 4


@dataclass(frozen=True, slots=True, eq=False)
class SampleCost:
    """Seconds of forward and backward of all layers and the head, on one device.

    The time of a subsequence is the sum of two terms: the time without attention, which depends on
    its number of tokens alone, and the attention time of its part of each sample.

    Attributes:
        workload: Model, machine, precision, sequence parallelism.
        tokens: Numbers of tokens of a subsequence, ascending, [points].
        seconds: Seconds without attention for each number of tokens, [points].
    """

    workload: Workload
    tokens: Floats
    seconds: Floats

    def without_attention_s(self, tokens: Floats) -> Floats:
        """Return the seconds of subsequences of `tokens` tokens without attention."""
        found: Floats = np.interp(tokens, self.tokens, self.seconds)
        return found

    def of_samples(self, lengths: Sequence[int]) -> list[float]:
        """Return the seconds of whole samples, long ones cut into subsequences of the largest size.

        Args:
            lengths: Tokens of each sample.
        """
        tokens = np.array(lengths, dtype=np.float64)
        whole, rest = np.divmod(tokens, self.tokens[-1])
        seconds = whole * self.seconds[-1] + self.without_attention_s(rest)
        total: list[float] = (seconds + self.attention_s(np.zeros_like(tokens), tokens)).tolist()
        return total

    def attention_s(self, begins: Floats, ends: Floats) -> Floats:
        """Return the seconds of attention over parts ``[begin, end)`` of samples, all layers.

        Args:
            begins: First position of each part in its sample, [parts].
            ends: One past the last position of each part, [parts].
        """
        parts = SampleParts(begins, ends, np.arange(len(begins)))
        seconds = np.zeros(len(begins))
        for kind, layers in kinds_of_model(self.workload.model, self.workload.trainable).items():
            seconds += layers * sum(attention_seconds(self.workload, parts, kind=kind))
        return seconds


@lru_cache(maxsize=32)
def sample_cost(workload: Workload, *, most_tokens: int) -> SampleCost:
    """Return the cost table for subsequences of up to `most_tokens` tokens."""
    doublings = max(1, int(np.ceil(np.log2(most_tokens))))
    tokens = np.unique(
        np.minimum(
            np.rint(2.0 ** np.linspace(0, doublings, doublings * _POINTS_PER_DOUBLING + 1)),
            most_tokens,
        )
    )
    parts = SampleParts(np.zeros_like(tokens), tokens, np.arange(len(tokens)))
    seconds = summed(head_parts(workload, tokens=tokens))
    for kind, layers in kinds_of_model(workload.model, workload.trainable).items():
        passes = layer_parts(workload, parts, kind=kind)
        attention = sum(attention_seconds(workload, parts, kind=kind))
        own = sum(summed(passes[name]) for name in ("forward", "backward", "weight"))
        seconds = seconds + layers * (own - attention)
    return SampleCost(workload, np.concatenate([[0.0], tokens]), np.concatenate([[0.0], seconds]))
