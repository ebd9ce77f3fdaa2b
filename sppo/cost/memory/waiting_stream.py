"""Memory of the residual stream, and of its gradient, that waits on a rank between two stages.

All units of a group (:func:`sppo.schedule.orders.steps.sequence_groups`) pass one stage of a rank
before the first of them enters the rank's next stage. While a unit runs forward, inputs of later
units have arrived, and outputs of earlier units have come back from the last rank; all wait on the
rank of the first stage. Gradients wait in the same way on the rank of the last stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from sppo.cost.candidate import Candidate
from sppo.schedule.costs import Table
from sppo.schedule.orders.names import LOOPED
from sppo.schedule.orders.steps import sequence_groups


def waiting_bytes(candidate: Candidate) -> tuple[Mapping[int, Table], Mapping[int, Table]]:
    """Return upper bounds of the bytes that wait while a unit runs its F, and its B, by stage.

    The bounds, [N] each, are missing for stages beside which nothing waits, as with one stage per
    rank. They assume that all units have arrived, which in a run depends on time. In the looped
    order no activation waits during backwards, and no gradient during forwards; in other orders
    both may. Waiting gradients of the looped order are not counted: each takes the place of its
    unit's gradient of the loss, which has a bucket. On a single pipeline rank, waiting activations
    are not counted either: their units have no gradient of the loss yet, and its bucket has room.
    """
    if candidate.virtual_stages == 1:
        return {}, {}
    workload = candidate.workload
    whole_row_bytes = workload.model.hidden_size * workload.element_bytes
    row_bytes = whole_row_bytes / workload.sequence_parallel_degree
    first, last = (
        candidate.stages_of_rank(rank) for rank in (0, candidate.pipeline_parallel_degree - 1)
    )
    if candidate.order == LOOPED:
        if candidate.pipeline_parallel_degree == 1:
            return {}, {}
        tokens = _waiting_tokens(candidate) * row_bytes
        return dict(zip(first, tokens, strict=True)), {}
    most = np.full(len(candidate.lengths), _waiting_tokens(candidate).max())
    ends = Counter([*first, *last])
    waiting = {stage: most * count * row_bytes for stage, count in ends.items()}
    return waiting, waiting


def _waiting_tokens(candidate: Candidate) -> Table:
    """Return the tokens that wait while a unit runs on each stage of a rank, [virtual stages, N].

    Nothing waits before the first stage or after the last. If sequences are cut alike, the sequence
    of a group with the most waiting tokens counts; packed sequences count one by one.
    """
    lengths, of_sequences = (
        np.array(candidate.lengths, dtype=np.float64),
        candidate.sequence_lengths,
    )
    groups = sequence_groups(of_sequences, num_ranks=candidate.pipeline_parallel_degree)
    if candidate.packed:
        ends = np.cumsum([len(of_sequence) for of_sequence in of_sequences])
        tokens = np.zeros((candidate.virtual_stages, len(lengths)))
        for group in groups:
            own = slice(int(ends[group.start - 1]) if group.start else 0, int(ends[group.stop - 1]))
            up_to = np.cumsum(lengths[own])
            tokens[:, own] = up_to[-1] - lengths[own]
            tokens[0, own] = up_to - lengths[own]
            tokens[-1, own] = up_to[-1] - up_to
        return tokens
    others = (len(groups[0]) - 1) * lengths.sum()
    in_front, behind = np.cumsum(lengths) - lengths, np.cumsum(lengths[::-1])[::-1] - lengths
    tokens = np.tile(in_front + behind + others, (candidate.virtual_stages, 1))
    tokens[0], tokens[-1] = in_front + others, behind + others
    return tokens
