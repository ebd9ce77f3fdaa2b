"""Number of CUDA streams that a rank uses, compared with the number that torch has.

torch has a pool of 32 streams per device and priority, and reuses them in turn. Two NCCL
communicators on one stream would wait for each other's messages, which may deadlock if ranks issue
messages in different orders; copies would wait for messages, too.
"""

from __future__ import annotations

from sppo.cost.communicators import CommunicatorUse, count_communicators
from sppo.parallel.mesh_shape import Coordinates, MeshShape

POOL_STREAMS = 32
"""Streams of torch's pool of each priority. Communicators with a limited number of thread blocks
have high priority."""
_COPIES = 2
"""Streams of a lane, which copies tensors to another tier and back."""


def count_streams(
    shape: MeshShape, at: Coordinates, use: CommunicatorUse, *, num_lanes: int = 0
) -> tuple[int, int]:
    """Return the streams of normal and of high priority of the rank at ``at``.

    There is one per communicator and copy stream.
    """
    full, limited = count_communicators(
        use,
        replicas=shape.data_parallel,
        pipeline_ranks=shape.pipeline_parallel,
        width=shape.sequence_parallel,
        key_copies=shape.key_copies,
        position=at.pipeline,
    )
    return full + _COPIES * num_lanes, limited


def check_streams(shape: MeshShape, use: CommunicatorUse, *, num_lanes: int = 0) -> None:
    """Raise ValueError if a rank needs more streams than torch has.

    Args:
        shape: Shape of the grid of ranks.
        use: Features of the run that need communicators.
        num_lanes: Number of lanes to other tiers: for offloaded tensors, and for training state.

    Raises:
        ValueError: A rank needs more streams of one priority than a pool has.
    """
    most = max(
        max(count_streams(shape, shape.coordinates(rank), use, num_lanes=num_lanes))
        for rank in range(shape.num_ranks)
    )
    if most > POOL_STREAMS:
        raise ValueError(
            f"a rank of {shape.pipeline_parallel} pipeline ranks would use {most} CUDA streams of "
            f"one priority, and torch has {POOL_STREAMS}: with parallel.multiplexed=on every range "
            "of ranks that shares units takes one of each; write parallel.multiplexed=off, or use "
            "fewer pipeline ranks"
        )
