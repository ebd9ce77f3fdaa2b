"""Timing of kernels: warm, synchronised, medians over rounds of all cases.

Each round measures every case of a subject once: a disturbance of about a second affects one round
of some cases, and not their medians.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

Call = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)

_WARM_S = 0.05
"""Duration of a call from which on later rounds need no warm-up call."""
_LONG_S = 0.1


@dataclass(frozen=True, slots=True)
class TimedCase(Generic[Key]):
    """One call to time.

    Attributes:
        key: Key of the case in the results.
        make: Function that builds the operands and returns the call to time; run in every round,
            so that only one case's operands exist at a time.
    """

    key: Key
    make: Callable[[], Call]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: median, least and most over all rounds."""

    median_s: float
    least_s: float
    most_s: float

    @property
    def spread(self) -> float:
        """Difference between the fastest and the slowest round, relative to the median."""
        return (self.most_s - self.least_s) / self.median_s


@dataclass(frozen=True, slots=True)
class Rounds:
    """Number and length of the rounds of a measurement.

    Attributes:
        device: "cpu" or "cuda".
        count: Rounds over all cases.
        count_long: Rounds for cases whose call takes longer than 0.1 s.
        window_s: Seconds for which the call is repeated in each round, at least once.
    """

    device: str
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


@torch.no_grad()
def time_cases(
    cases: Sequence[TimedCase[Key]], *, rounds: Rounds, watcher: Watcher
) -> Mapping[Key, Timing]:
    """Time every case in every round and return the timings by key."""
    seconds: dict[Key, list[float]] = {case.key: [] for case in cases}
    assert len(seconds) == len(cases), "every case has a key of its own"
    for turn in range(rounds.count):
        for case in cases:
            so_far = seconds[case.key]
            known_s = min(so_far, default=0.0)
            if turn < rounds.count_long or known_s <= _LONG_S:
                so_far.append(_time(case.make(), rounds=rounds, known_s=known_s))
            watcher.advance()
    return {
        key: Timing(statistics.median(values), min(values), max(values))
        for key, values in seconds.items()
    }


def _time(call: Call, *, rounds: Rounds, known_s: float) -> float:
    """Return the mean seconds of the calls of one round."""
    if known_s < _WARM_S:
        _timed(call, calls=1, device=rounds.device)  # fills caches, selects kernels, allocates
    if known_s == 0.0:
        known_s = _timed(call, calls=1, device=rounds.device)
    calls = max(1, math.ceil(rounds.window_s / max(known_s, 1e-7)))
    return _timed(call, calls=calls, device=rounds.device)


def time_once(call: Call, *, device: str) -> float:
    """Return the seconds of one warm call, an estimate for the choice of sizes."""
    _timed(call, calls=1, device=device)
    return _timed(call, calls=1, device=device)


def _timed(call: Call, *, calls: int, device: str) -> float:
    _synchronise(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    _synchronise(device)
    return (time.perf_counter() - start) / calls


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
