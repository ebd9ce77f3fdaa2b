"""Bytes of the states that layers with linear attention pass from subsequence to subsequence.

A state is a matrix of each value head and the last inputs of the convolution. That behind a
subsequence is held from the forward of the subsequence to the end of its backward, since the
backward of the next subsequence puts the gradient of the state in its place. Nothing follows the
last subsequence. Layers without a backward hold the newest state alone, and so do evaluations.
"""

from __future__ import annotations

import numpy as np

from sppo.config.model import ModelConfig
from sppo.cost.candidate import Candidate
from sppo.cost.workload import ACCUMULATION_BYTES
from sppo.schedule.costs import Table


def state_bytes(model: ModelConfig, element_bytes: int, shard_count: int) -> int:
    """Return the bytes of a state of one layer on one device; 0 without linear attention.

    Args:
        model: Model configuration.
        element_bytes: Bytes of an element of the compute dtype.
        shard_count: Devices over which the heads of a layer are sharded (Ulysses).
    """
    if model.linear_attention is None:
        return 0
    own = model.linear_attention.of_rank(shard_count)
    matrices = own.value_heads * own.key_size * own.value_size * ACCUMULATION_BYTES
    return matrices + own.carried_tokens * own.conv_width * element_bytes


def states_of_units(candidate: Candidate) -> Table:
    """Return the bytes of the states behind each subsequence in layers with a backward.

    Returns:
        [stages, subsequences].
    """
    is_held = np.ones(len(candidate.lengths))
    is_held[[own.stop - 1 for own in candidate.distinct_sequences]] = 0
    return _states_of_stages(candidate, has_backward=True) * is_held


def passing_states_of_units(candidate: Candidate) -> Table:
    """Return the bytes of the newest states in layers without a backward, [stages, subsequences].

    Those of a whole sequence count in its first subsequence.
    """
    is_held = np.zeros(len(candidate.lengths))
    is_held[[own.start for own in candidate.distinct_sequences if own.stop - own.start > 1]] = 1
    return _states_of_stages(candidate, has_backward=False) * is_held


def _states_of_stages(candidate: Candidate, *, has_backward: bool) -> Table:
    """Return the bytes of a state of each of some layers of a stage, all together, [stages, 1]."""
    workload = candidate.workload
    layers = candidate.sums_over_layers(
        lambda kind: kind.linear is not None and kind.has_backward == has_backward
    )
    each = state_bytes(workload.model, workload.element_bytes, workload.sequence_parallel_degree)
    of_stages: Table = layers[:, None] * each
    return of_stages
