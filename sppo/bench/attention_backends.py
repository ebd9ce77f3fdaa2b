"""Attention back ends side by side: which can be timed here, and what timing them gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from sppo.bench.attention_grid import AttentionGrid, AttentionShape
from sppo.cost.flops import FLASH_BACKWARD_RATIO
from sppo.kernels.attention.choice import (
    CAPABILITIES,
    AttentionCase,
    BackendName,
    error_on_a_small_case,
    why_not,
)

BACKENDS: tuple[BackendName, ...] = tuple(
    name for name in get_args(BackendName) if CAPABILITIES[name].automatic
)
"""The definition is left out: its memory is that of all scores."""


@dataclass(frozen=True, slots=True)
class BackendRate:
    """One back end on one shape, forward and backward.

    Attributes:
        backend: Its name.
        shape: What was timed.
        forward_s: Median seconds of a call.
        backward_s: The same; gradients of keys and values are added to fp32 sums.
        spread: Between the fastest and the slowest round, relative to the median; the larger of
            both directions.
    """

    backend: BackendName
    shape: AttentionShape
    forward_s: float
    backward_s: float
    spread: float

    @property
    def both_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s

    @property
    def forward_flops_per_s(self) -> float:
        """FLOPs of the forward per second, over visible pairs."""
        return self.shape.forward_flops / self.forward_s

    @property
    def backward_flops_per_s(self) -> float:
        """FLOPs of the backward per second, over visible pairs: 2.5 times the forward's FLOPs."""
        return FLASH_BACKWARD_RATIO * self.shape.forward_flops / self.backward_s

    def as_json(self) -> dict[str, Any]:
        """Return one flat object; seconds and FLOP/s."""
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
class LeftOut:
    """A back end that was not timed on a shape, and why, as the end of a sentence."""

    backend: BackendName
    shape: AttentionShape
    reason: str


@dataclass(frozen=True, slots=True)
class BackendComparison:
    """Rates of all back ends that were timed, and why others were not.

    Attributes:
        rates: By shape; every shape has at least one.
        automatic: What ``auto`` takes for each shape, timed or not.
        left_out: The rest of every shape and back end.
    """

    rates: tuple[BackendRate, ...]
    automatic: Mapping[AttentionShape, BackendName]
    left_out: tuple[LeftOut, ...] = ()

    @property
    def by_shape(self) -> Mapping[AttentionShape, Mapping[BackendName, BackendRate]]:
        """Rates by shape and back end, in the order in which they were timed."""
        found: dict[AttentionShape, dict[BackendName, BackendRate]] = {}
        for rate in self.rates:
            found.setdefault(rate.shape, {})[rate.backend] = rate
        return found

    @property
    def backends(self) -> tuple[BackendName, ...]:
        """Return those that were timed, in the order in which ``auto`` prefers them."""
        timed = {rate.backend for rate in self.rates}
        return tuple(name for name in CAPABILITIES if name in timed)


def failure(error: Exception) -> str:
    """Return the error that a back end ended with, as the end of a sentence."""
    first_line = (str(error).splitlines() or [""])[0]
    return f"fails with {type(error).__name__}: {first_line}"


def backends_to_try(grid: AttentionGrid, *, device: str) -> tuple[BackendName, ...]:
    """Return those asked for, else all that are made for ``device``."""
    if grid.backends is not None:
        return grid.backends
    return tuple(
        name
        for name in BACKENDS
        if device in CAPABILITIES[name].devices and not _interpreted(name, device)
    )


def why_not_timed(name: BackendName, case: AttentionCase) -> str | None:
    """Return why a back end is not timed on ``case``, as the end of a sentence; None if it is."""
    if _interpreted(name, case.device.type):
        return f"runs on {case.device.type} under its interpreter only, whose times say nothing"
    return why_not(name, case) or error_on_a_small_case(name, case)


def why_never_timed(
    name: BackendName, grid: AttentionGrid, *, dtypes: Sequence[str], device: str
) -> str | None:
    """The first reason of a back end that can do nothing of ``grid``; None if it can do some."""
    reasons = []
    for shapes in grid.problems(dtypes):
        reason = why_not_timed(name, shapes[0].case(device))
        if reason is None:
            return None
        reasons.append(reason)
    return reasons[0]


def _interpreted(name: BackendName, device: str) -> bool:
    return name == "triton" and device == "cpu"
