"""Number of CUDA streams that a rank uses, compared with the number that torch has.

torch has a pool of 32 streams per device and priority, and reuses them in turn. Two NCCL
communicators on one stream would wait for each other's messages, which may deadlock if ranks issue
messages in different orders; copies would wait for messages, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from sppo.cost.communicators import CommunicatorUse, count_communicators
from sppo.parallel.mesh_shape import Coordinates, MeshShape

POOL_STREAMS = 32
_COPIES = 2
"""Streams for copies of offloaded tensors; as many more for copies of training state."""


@dataclass(frozen=True, slots=True)
class StreamCount:
    """Number of streams that a rank takes from each of torch's pools."""

    normal: int
    high: int
    """Streams of high priority: those of communicators with a limited number of thread blocks."""

    @property
    def fits(self) -> bool:
        """True if neither pool has to reuse a stream."""
        return max(self.normal, self.high) <= POOL_STREAMS


@dataclass(frozen=True, slots=True)
class StreamUse(CommunicatorUse):
    """Features of a run that need streams in addition to those of the grid of ranks."""

    offloads: bool = False
    offloads_state: bool = False


def count_streams(shape: MeshShape, at: Coordinates, use: StreamUse) -> StreamCount:
    """Return the number of streams of the rank at ``at``: one per communicator and copy stream."""
    count = count_communicators(
        use,
        replicas=shape.data_parallel,
        pipeline_ranks=shape.pipeline_parallel,
        width=shape.sequence_parallel,
        key_copies=shape.key_copies,
        position=at.pipeline,
    )
    copies = _COPIES * (use.offloads + use.offloads_state)
    return StreamCount(count.full + copies, high=count.limited)


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
