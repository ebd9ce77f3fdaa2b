"""Communicators of a rank on GPUs, and the device memory that NCCL takes for them.

NCCL allocates the buffers of a communicator itself, when its ranks first exchange a message: a
buffer for each channel (thread block) and peer. Memory is therefore proportional to the number of
channels, and larger where every rank exchanges messages with every other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sppo.cost.candidate import Candidate
from sppo.cost.sharding.heads import tensor_shard

OVERLAP_MAX_CTAS = 8
"""Most NCCL thread blocks of a message that overlaps compute, or is small. The number is limited,
since a message that waits for its peer occupies the multiprocessors of its blocks (an H100 has 132
of them)."""
_MOST_CTAS = 32
"""Thread blocks of a communicator without a limit, to which `communicator_bytes` refers."""
_ALL_TO_ALL_PEER = 0.7
"""Memory of each peer of an all-to-all in the same node, as a fraction of a communicator that
exchanges messages with neighbours only: 0.47 of 0.69 GB, on eight H100
(https://github.com/NVIDIA/nccl/issues/1685). Peers of other nodes share few channels."""


@dataclass(frozen=True, slots=True)
class CommunicatorUse:
    """Features of a run that need communicators in addition to those of the degrees."""

    ranges: Sequence[tuple[int, int]] = ()
    """Ranges (first, last) of pipeline ranks that form MSP groups."""
    cuts_units: bool = False
    """True if pipeline ranks that are not neighbours may exchange MSP shards."""
    wraps: bool = False
    """True if the last rank of a pipeline sends to the first."""
    ties_ends: bool = False
    """True if the first and the last rank of a pipeline share a parameter that trains."""
    gathers_weights: bool = False
    """True if weights are gathered for use (ZeRO-3)."""

    @classmethod
    def of(cls, candidate: Candidate, *, ranges: Sequence[tuple[int, int]] = ()) -> CommunicatorUse:
        """Return the features of a candidate, whose MSP groups form ``ranges``."""
        model, trainable = candidate.workload.model, candidate.workload.trainable
        return cls(
            ranges=ranges,
            cuts_units=candidate.schedule == "sppo_msp",
            wraps=candidate.virtual_stages > 1,
            ties_ends=model.tie_embeddings and trainable.trains("embed.weight"),
            gathers_weights=candidate.zero >= 3,
        )


def count_communicators(
    use: CommunicatorUse,
    *,
    replicas: int,
    pipeline_ranks: int,
    width: int,
    key_copies: int | None,
    position: int,
) -> tuple[int, int]:
    """Return the numbers of communicators that :class:`sppo.parallel.mesh.Mesh` makes on a rank.

    Args:
        use: Features of the run.
        replicas: Data-parallel degree.
        pipeline_ranks: Pipeline-parallel degree.
        width: Sequence-parallel degree.
        key_copies: Ranks of a sequence-parallel group with the same key/value heads, if it shards
            weights; None if it does not.
        position: Position of the rank in its pipeline.

    Returns:
        Communicators with as many thread blocks as NCCL chooses; and those with at most
        `OVERLAP_MAX_CTAS`, in streams of high priority.
    """
    last = pipeline_ranks - 1
    edges = (position > 0) + (position < last)
    if use.wraps and pipeline_ranks > 2:
        edges += position in (0, last)
    ranges = sum(begin <= position <= end and begin < end for begin, end in use.ranges)
    stage, block = replicas * width > 1, bool(key_copies) and replicas > 1
    keys = (key_copies or 0) > 1
    limited = 2 * edges + ranges + keys
    limited += (use.cuts_units and last > 0) + (
        use.ties_ends and last > 0 and position in (0, last)
    )
    limited += (stage + block + keys) * use.gathers_weights
    return stage + block + (width > 1) + ranges, limited


def communicators_bytes(
    candidate: Candidate, *, position: int, ranges: Sequence[tuple[int, int]] = ()
) -> int:
    """Return the device memory of the communicators of a pipeline rank; 0 without NCCL.

    Args:
        candidate: Candidate that the rank runs.
        position: Position of the rank in its pipeline.
        ranges: Ranges (first, last) of pipeline ranks that form MSP groups.
    """
    each = candidate.workload.hardware.network.communicator_bytes
    if not each or candidate.num_devices == 1:
        return 0
    workload, width = candidate.workload, candidate.workload.sequence_parallel_degree
    shards_weights = workload.sequence_parallel == "megatron" and width > 1
    full, limited = count_communicators(
        CommunicatorUse.of(candidate, ranges=ranges),
        replicas=candidate.data_parallel_degree,
        pipeline_ranks=candidate.pipeline_parallel_degree,
        width=width,
        key_copies=tensor_shard(workload.model, degree=width).repeats if shards_weights else None,
        position=position,
    )
    peers = min(width, workload.hardware.node.num_devices) - 1
    exchanges = max(0.0, _ALL_TO_ALL_PEER * peers - 1)
    whole = full + exchanges * (not shards_weights)
    return round(each * (whole + limited * OVERLAP_MAX_CTAS / _MOST_CTAS))
