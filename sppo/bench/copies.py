"""Rates of copies between a device and its next tier: one direction alone, and both at once.

On a GPU the next tier is host memory (:mod:`sppo.bench.pcie`), on a CPU a disk
(:mod:`sppo.bench.disk`). A plan wants the rates with both directions busy: while one subsequence's
tensors leave, another's come back.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

TierKind = Literal["host", "disk"]
Times = Sequence[float]
"""Seconds from the start at which request after request was done."""


@dataclass(frozen=True, slots=True)
class CopyPoint:
    """Rates of one way of copying, bytes/s; medians over rounds.

    Attributes:
        how: What copies the bytes between which memories.
        request_bytes: Of one request.
        in_flight: Requests per direction that are with a disk at once; in a stream, one.
        out_alone_bytes_per_s: Out of the device, nothing coming back.
        back_alone_bytes_per_s: Back to the device, nothing leaving.
        out_bytes_per_s: Out while others come back.
        back_bytes_per_s: Back while others leave.
        numa_node: That the host memory is bound to; None where it is not bound.
        spread: Between the fastest and the slowest round of any of the four, over its median.
    """

    how: str
    request_bytes: int
    in_flight: int
    out_alone_bytes_per_s: float
    back_alone_bytes_per_s: float
    out_bytes_per_s: float
    back_bytes_per_s: float
    numa_node: int | None = None
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class CopyMeasurements:
    """Findings of one run of the copy benchmark.

    Attributes:
        tier: "host" or "disk".
        where: Name of the tier, and how the bytes got there.
        points: One per way, request size and requests in flight.
        planned: The one that copies bytes as training does; its rates go into the description.
        room_bytes: Of a disk, what a run may take of it; 0 for host memory.
        first_write_bytes_per_s: Of a disk, the first write of space that was only set aside.
        register_s_per_gib: Of host memory, what page-locking takes.
    """

    tier: TierKind
    where: str
    points: tuple[CopyPoint, ...]
    planned: CopyPoint
    room_bytes: int = 0
    first_write_bytes_per_s: float = 0.0
    register_s_per_gib: float = 0.0


@dataclass(frozen=True, slots=True)
class Directions:
    """Runs copies: ``run(out, back)`` in the directions that are true, both at once if both are.

    Attributes:
        run: Gives the times of (out, back), empty for a direction that is false.
    """

    run: Callable[[bool, bool], tuple[Times, Times]]


def busy_rates(out: Times, back: Times, *, request_bytes: int) -> tuple[float, float]:
    """Rates (out, back) in bytes/s for as long as all directions that ran were busy.

    A direction that goes on alone after the other has ended would look faster than it is.
    """
    ran = [times for times in (out, back) if times]
    assert ran, "at least one direction ran"
    end = min(times[-1] for times in ran)
    return _rate(out, end, request_bytes), _rate(back, end, request_bytes)


def _rate(times: Times, end: float, request_bytes: int) -> float:
    """Bytes of the requests done by ``end`` over the time the last of them was done."""
    if not times:
        return 0.0
    done = [time for time in times if time <= end] or [times[0]]
    return len(done) * request_bytes / done[-1]


def measure_point(
    directions: Directions,
    *,
    how: str,
    request_bytes: int,
    in_flight: int,
    rounds: int,
    numa_node: int | None = None,
    advance: Callable[[], None],
) -> CopyPoint:
    """Time each direction alone and both together, in ``rounds`` rounds of all three."""
    found: list[tuple[float, float, float, float]] = []
    for _ in range(rounds):
        out_alone, _ = busy_rates(*directions.run(True, False), request_bytes=request_bytes)
        _, back_alone = busy_rates(*directions.run(False, True), request_bytes=request_bytes)
        both = busy_rates(*directions.run(True, True), request_bytes=request_bytes)
        found.append((out_alone, back_alone, *both))
        advance()
    columns = list(zip(*found, strict=True))
    out_alone, back_alone, out, back = (statistics.median(column) for column in columns)
    spread = max((max(c) - min(c)) / statistics.median(c) for c in columns)
    return CopyPoint(
        how, request_bytes, in_flight, out_alone, back_alone, out, back, numa_node, spread
    )
