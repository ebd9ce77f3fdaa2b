"""Division of the samples of a step over data-parallel replicas."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def divide_samples(seconds: Sequence[float], *, replicas: int) -> tuple[tuple[int, ...], ...]:
    """Divide samples over replicas so that all take about equal time.

    Samples are assigned in the order of decreasing cost, each to the replica with the least cost so
    far (longest processing time first, Graham 1969: at most a third above the optimum). The result
    depends only on costs, so all ranks that compute equal costs divide alike.

    Args:
        seconds: Seconds of each sample.
        replicas: Number of replicas, at most the number of samples.

    Returns:
        The indices of the samples of each replica, ascending.

    Raises:
        ValueError: There are fewer samples than replicas.
    """
    if len(seconds) < replicas:
        raise ValueError(
            f"{len(seconds)} samples for {replicas} data-parallel replicas: each needs one; raise "
            "train.samples_per_step or train.tokens_per_step, or lower "
            "parallel.data_parallel_degree"
        )
    heap = [(0.0, 0, replica) for replica in range(replicas)]
    found: list[list[int]] = [[] for _ in range(replicas)]
    for index in sorted(range(len(seconds)), key=lambda index: (-seconds[index], index)):
        total, count, replica = heapq.heappop(heap)
        found[replica].append(index)
        heapq.heappush(heap, (total + seconds[index], count + 1, replica))
    return tuple(tuple(sorted(samples)) for samples in found)
