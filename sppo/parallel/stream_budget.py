"""Number of CUDA streams that a rank uses, compared with the number that torch has.

torch has a pool of 32 streams per device and priority, and reuses them in turn. Two NCCL
communicators on one stream would wait for each other's messages, which may deadlock if ranks issue
messages in different orders; copies would wait for messages, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sppo.parallel.mesh_shape import Coordinates, MeshShape

POOL_STREAMS = 32
_COPIES = 2
"""Streams for copies of offloaded tensors; as many more for copies of training state."""


@dataclass(frozen=True, slots=True)
class StreamCount:
    """Number of streams that a rank takes from each of torch's pools."""

    normal: int
    high: int
    """Streams of high priority: those of communicators whose messages overlap compute."""

    @property
    def fits(self) -> bool:
        """True if neither pool has to reuse a stream."""
        return max(self.normal, self.high) <= POOL_STREAMS


@dataclass(frozen=True, slots=True)
class StreamUse:
    """Features of a run that need streams in addition to those of the grid of ranks."""

    ranges: Sequence[tuple[int, int]] = ()
    """Ranges (first, last) of pipeline ranks that form MSP groups; empty without MSP."""
    wraps: bool = False
    ties_ends: bool = False
    gathers_weights: bool = False
    """True if weights are gathered for use (ZeRO-3)."""
    offloads: bool = False
    offloads_state: bool = False


def count_streams(shape: MeshShape, at: Coordinates, use: StreamUse) -> StreamCount:
    """Return the number of streams of the rank at ``at``: one per communicator and copy stream."""
    here, size = at.pipeline, shape.pipeline_parallel
    edges = (here > 0) + (here < size - 1)
    if use.wraps and size > 2:
        edges += here in (0, size - 1)
    ranges = sum(first <= here <= last and first < last for first, last in use.ranges)
    same = [shape.stage_ranks(at)]
    if shape.key_copies:
        same.append(shape.block_ranks(at))
        if shape.key_copies > 1:
            same.append(shape.block_ranks(at, copies=shape.key_copies))
    holders = sum(len(ranks) > 1 for ranks in same)
    normal = holders + (shape.sequence_parallel > 1) + ranges
    normal += bool(use.ranges) and size > 1
    normal += use.ties_ends and size > 1 and here in (0, size - 1)
    normal += _COPIES * (use.offloads + use.offloads_state)
    return StreamCount(normal, high=2 * edges + ranges + holders * use.gathers_weights)


def check_streams(shape: MeshShape, use: StreamUse) -> None:
    """Raise ValueError if a rank needs more streams than torch has.

    Raises:
        ValueError: A rank needs more streams of one priority than a pool has.
    """
    counts = [count_streams(shape, shape.coordinates(rank), use) for rank in range(shape.num_ranks)]
    worst = max(counts, key=lambda count: max(count.normal, count.high))
    if not worst.fits:
        raise ValueError(
            f"a rank of {shape.pipeline_parallel} pipeline ranks would use "
            f"{max(worst.normal, worst.high)} CUDA streams of one priority, and torch has "
            f"{POOL_STREAMS}: with parallel.multiplexed=on every range of ranks that shares units "
            "takes one of each; write parallel.multiplexed=off, or use fewer pipeline ranks"
        )
