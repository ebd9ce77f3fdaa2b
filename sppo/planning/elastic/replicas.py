"""Dividing the samples of a step over data-parallel replicas."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def divide_samples(seconds: Sequence[float], *, replicas: int) -> tuple[tuple[int, ...], ...]:
    """Give each replica samples that take about as long together.

    The costliest sample goes first, each to the replica with least so far (longest processing time
    first, Graham 1969: at most a third above the best there is). Costs are compared, so every rank
    that computes them alike divides alike.

    Args:
        seconds: of each sample.
        replicas: how many, at most as many as there are samples.

    Returns:
        The samples of each replica, ascending.

    Raises:
        ValueError: a replica would have none.
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
