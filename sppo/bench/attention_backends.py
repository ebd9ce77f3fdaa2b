"""Comparison of attention back ends: back ends to time on this device, and their rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from sppo.bench.attention_grid import AttentionShape
from sppo.cost.flops import FLASH_BACKWARD_RATIO
from sppo.kernels.attention.choice import (
    CAPABILITIES,
    AttentionCase,
    BackendName,
    error_on_a_small_case,
    why_not,
)

BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
"""All back ends."""
BackendShape = tuple[BackendName, AttentionShape]


@dataclass(frozen=True, slots=True)
class BackendRate:
    """Measured times of one back end on one shape, forward and backward.

    Attributes:
        backend: Name of the back end.
        shape: Shape that was timed.
        forward_s: Median seconds of a forward call.
        backward_s: Median seconds of a backward call, which adds to fp32 sums of dk and dv.
        spread: Difference between the fastest and the slowest round, relative to the median; the
            larger one of forward and backward.
    """

    backend: BackendName
    shape: AttentionShape
    forward_s: float
    backward_s: float
    spread: float

    @property
    def both_s(self) -> float:
        """Seconds of a forward and a backward call."""
        return self.forward_s + self.backward_s

    @property
    def forward_flops_per_s(self) -> float:
        """FLOP/s of the forward, over visible pairs."""
        return self.shape.forward_flops / self.forward_s

    @property
    def backward_flops_per_s(self) -> float:
        """FLOP/s of the backward, over visible pairs, with 2.5 times the forward's FLOPs."""
        return FLASH_BACKWARD_RATIO * self.shape.forward_flops / self.backward_s

    def as_json(self) -> dict[str, Any]:
        """Return one flat JSON object of shape, seconds and FLOP/s."""
        shape = self.shape
        return {
            "backend": self.backend,
            "dtype": shape.dtype,
            "queries": shape.queries,
            "keys": shape.keys,
            "heads": shape.heads.queries,
            "kv_heads": shape.heads.kv,
            "head_size": shape.head_size,
            "forward_s": self.forward_s,
            "backward_s": self.backward_s,
            "forward_flops_per_s": self.forward_flops_per_s,
            "backward_flops_per_s": self.backward_flops_per_s,
            "spread": self.spread,
        }


@dataclass(frozen=True, slots=True)
class BackendComparison:
    """Rates of all timed back ends, and the reasons why others were not timed.

    Attributes:
        rates: Rates of all timed pairs of back end and shape.
        automatic: Back end that ``auto`` chooses for each timed shape, even if another was timed.
        left_out: Reasons why the other pairs were not timed, as the ends of sentences.
    """

    rates: tuple[BackendRate, ...]
    automatic: Mapping[AttentionShape, BackendName]
    left_out: Mapping[BackendShape, str] = field(default_factory=dict)

    @property
    def by_shape(self) -> Mapping[AttentionShape, Mapping[BackendName, BackendRate]]:
        """Rates by shape and back end, in the order in which they were timed."""
        found: dict[AttentionShape, dict[BackendName, BackendRate]] = {}
        for rate in self.rates:
            found.setdefault(rate.shape, {})[rate.backend] = rate
        return found

    @property
    def backends(self) -> tuple[BackendName, ...]:
        """Timed back ends, in the order of the table of capabilities."""
        timed = {rate.backend for rate in self.rates}
        return tuple(name for name in CAPABILITIES if name in timed)


def why_not_timed(name: BackendName, case: AttentionCase) -> str | None:
    """Return why a back end is not timed on ``case``, as the end of a sentence; None if it is."""
    return why_not(name, case) or error_on_a_small_case(name, case)
