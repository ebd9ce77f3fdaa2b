"""Rates of copies between a device and its next tier: one direction alone, and both at once.

On a GPU the next tier is host memory (:mod:`sppo.bench.pcie`), on a CPU a disk
(:mod:`sppo.bench.disk`). Plans use the rates with both directions busy: while one subsequence's
tensors are copied out, another's are copied back.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

TierKind = Literal["host", "disk"]
Times = Sequence[float]
"""Completion times of successive requests, in seconds from the start."""
Run = Callable[[bool, bool], tuple[Times, Times]]
"""Function of two flags (out, back) that runs the directions whose flags are true, at the same
time, and returns the times of (out, back), empty for the others."""


@dataclass(frozen=True, slots=True)
class CopyPoint:
    """Rates of copies in requests of one size, bytes/s; medians over rounds.

    Attributes:
        request_bytes: Bytes of one request.
        out_alone_bytes_per_s: Rate out of the device, without copies back.
        back_alone_bytes_per_s: Rate back to the device, without copies out.
        out_bytes_per_s: Rate out of the device during copies back.
        back_bytes_per_s: Rate back to the device during copies out.
        spread: Largest difference between the fastest and the slowest round of any of the four
            rates, relative to the rate's median.
        package: Python package that copies to host memory; "" for a disk.
    """

    request_bytes: int
    out_alone_bytes_per_s: float
    back_alone_bytes_per_s: float
    out_bytes_per_s: float
    back_bytes_per_s: float
    spread: float = 0.0
    package: str = ""


@dataclass(frozen=True, slots=True)
class CopyMeasurements:
    """Results of one run of the copy benchmark.

    Attributes:
        tier: "host" or "disk".
        where: Description of the tier and of the path of the bytes, for users.
        points: Rates by request size.
        planned: Point that copies as training does; its rates go into the hardware description.
        room_bytes: Bytes of the disk that a run may use; 0 for host memory.
    """

    tier: TierKind
    where: str
    points: tuple[CopyPoint, ...]
    planned: CopyPoint
    room_bytes: int = 0


def each_way(move: Callable[[int], None], ways: Sequence[int]) -> None:
    """Call ``move`` with each of ``ways``, 0 for out and 1 for back, in threads of their own.

    Raises:
        Exception: The first exception that a call raised, once all have ended.
    """
    with ThreadPoolExecutor(len(ways)) as threads:
        moving = [threads.submit(move, way) for way in ways]
    for one in moving:
        one.result()


def busy_rates(out: Times, back: Times, *, request_bytes: int) -> tuple[float, float]:
    """Return the rates (out, back) in bytes/s while all directions that ran were busy.

    The time after one direction has ended is excluded, because the other is faster alone.
    """
    end = min(times[-1] for times in (out, back) if times)
    return _rate(out, end, request_bytes), _rate(back, end, request_bytes)


def _rate(times: Times, end: float, request_bytes: int) -> float:
    """Return the bytes of requests completed by ``end`` over the time of the last completion."""
    if not times:
        return 0.0
    done = [time for time in times if time <= end] or [times[0]]
    return len(done) * request_bytes / done[-1]


def measure_point(
    run: Run,
    *,
    request_bytes: int,
    rounds: int,
    advance: Callable[[], None] = lambda: None,
) -> CopyPoint:
    """Time copies out, copies back, and both together, each once in every round."""
    found: list[tuple[float, float, float, float]] = []
    for _ in range(rounds):
        out_alone, _ = busy_rates(*run(True, False), request_bytes=request_bytes)
        _, back_alone = busy_rates(*run(False, True), request_bytes=request_bytes)
        both = busy_rates(*run(True, True), request_bytes=request_bytes)
        found.append((out_alone, back_alone, *both))
        advance()
    columns = list(zip(*found, strict=True))
    out_alone, back_alone, out, back = (statistics.median(column) for column in columns)
    spread = max((max(c) - min(c)) / statistics.median(c) for c in columns)
    return CopyPoint(request_bytes, out_alone, back_alone, out, back, spread)
