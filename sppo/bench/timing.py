"""Timing of kernels: warm, synchronised, medians over rounds of all cases.

Each round measures every case of a subject once: a disturbance of about a second affects one round
of some cases, and not their medians.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import torch

from sppo.bench.operands import Operands

Call = Callable[[], object]
Make = Callable[[], Call]
"""Function that builds the operands of a call and returns the call. It runs in every round, so that
only one call's operands exist at a time."""
Key = TypeVar("Key", bound=Hashable)

_WARM_S = 0.05
"""Duration of a call from which on later rounds need no warm-up call."""
_LONG_S = 0.1


class Timing(NamedTuple):
    """Seconds of one call over all rounds."""

    median_s: float
    """Median over the rounds."""
    spread: float
    """Difference between the fastest and the slowest round, relative to the median."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Number and length of the rounds of a measurement.

    Attributes:
        count: Rounds over all cases.
        count_long: Rounds for cases whose call takes longer than 0.1 s.
        window_s: Seconds for which the call is repeated in each round, at least once.
    """

    count: int = 5
    count_long: int = 3
    window_s: float = 0.01


class Watcher(Protocol):
    """Receiver of the progress of measurements."""

    def begin(self, subject: str, *, total: int) -> None:
        """Announce ``total`` timings of ``subject``."""
        ...

    def advance(self) -> None:
        """Report that one timing is complete."""
        ...


@dataclass(frozen=True, slots=True)
class KernelBench:
    """Device, precisions, rounds and progress that all measurements of kernels share.

    Attributes:
        operands: Operands on the device.
        dtypes: Some of bf16 and fp32.
        rounds: Number and length of the rounds.
        watcher: Receiver of the progress, notified of every timing.
        spreads: Spreads of all timings so far.
    """

    operands: Operands
    dtypes: Sequence[str]
    rounds: Rounds
    watcher: Watcher
    spreads: list[float] = field(default_factory=list)

    @torch.no_grad()
    def time(self, subject: str, cases: Mapping[Key, Make]) -> Mapping[Key, Timing]:
        """Time every case of a subject in every round and return the timings by key."""
        seconds: dict[Key, list[float]] = {key: [] for key in cases}
        self.watcher.begin(subject, total=len(cases) * self.rounds.count)
        for turn in range(self.rounds.count):
            for key, make in cases.items():
                known_s = min(seconds[key], default=0.0)
                if turn < self.rounds.count_long or known_s <= _LONG_S:
                    seconds[key].append(self._time_round(make(), known_s=known_s))
                self.watcher.advance()
        timings = {key: _timing(values) for key, values in seconds.items()}
        self.spreads.extend(timing.spread for timing in timings.values())
        return timings

    def time_once(self, call: Call) -> float:
        """Return the seconds of one warm call, an estimate for the choice of sizes."""
        self._timed(call, calls=1)
        return self._timed(call, calls=1)

    def _time_round(self, call: Call, *, known_s: float) -> float:
        """Return the mean seconds of the calls of one round."""
        if known_s < _WARM_S:
            self._timed(call, calls=1)  # fills caches, selects kernels, allocates
        if known_s == 0.0:
            known_s = self._timed(call, calls=1)
        calls = max(1, math.ceil(self.rounds.window_s / max(known_s, 1e-7)))
        return self._timed(call, calls=calls)

    def _timed(self, call: Call, *, calls: int) -> float:
        self._synchronise()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        self._synchronise()
        return (time.perf_counter() - start) / calls

    def _synchronise(self) -> None:
        if self.operands.device == "cuda":
            torch.cuda.synchronize()


def _timing(seconds: Sequence[float]) -> Timing:
    median_s = statistics.median(seconds)
    return Timing(median_s, (max(seconds) - min(seconds)) / median_s)
