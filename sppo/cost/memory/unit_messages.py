"""Memory of a unit's messages while it runs: received, sent, exchanged and waiting tensors.

All units of a group (:func:`sppo.schedule.orders.rank_orders.sequence_groups`) pass one stage of a
rank before the first of them enters the rank's next stage. While a unit runs forward, inputs of
later units have arrived, and outputs of earlier units have come back from the last rank; all wait
on the rank of the first stage. Gradients wait in the same way on the rank of the last stage.
"""

from __future__ import annotations

import numpy as np

from sppo.cost.candidate import Candidate
from sppo.schedule.costs import Table
from sppo.schedule.orders.names import LOOPED
from sppo.schedule.orders.rank_orders import sequence_groups


def sent_bytes(candidate: Candidate) -> Table:
    """Return the bytes of messages, exchanges and waiting units while each unit runs.

    Messages go to and from neighbouring stages, exchanges stay in the sequence-parallel group, and
    units wait on a rank between two of its stages.

    Returns:
        Bytes during the forward, and during the backward of each unit, [2, stages, N].
    """
    workload = candidate.workload
    lengths = np.array(candidate.lengths, dtype=np.float64)
    row_bytes = 2 * workload.model.hidden_size * workload.element_bytes  # one message each way
    sent = lengths // workload.sequence_parallel_degree * row_bytes
    of_units = candidate.neighbours[:, None] * sent + exchanged_bytes(candidate, lengths)
    return of_units + _waiting_bytes(candidate)


def exchanged_bytes(candidate: Candidate, lengths: Table) -> Table:
    """Return the bytes of tensors that a sequence-parallel group exchanges for units of `lengths`.

    Ulysses holds q, k, v and o twice. Megatron holds tensors of all tokens where the working set
    counts only the device's own, most in the backward of the MLP: both normed inputs, gathered
    again, this rank's part of their gradient, and all ranks' parts for its own tokens.
    """
    workload = candidate.workload
    model, degree = workload.model, workload.sequence_parallel_degree
    if degree == 1:
        return np.zeros(len(lengths))
    if workload.sequence_parallel == "megatron":
        gathered: Table = 4 * lengths * model.hidden_size * workload.element_bytes
        return gathered
    heads = 2 * (2 * model.num_heads + 2 * model.kv_heads) * model.head_dim
    exchanged: Table = (lengths // degree) * workload.element_bytes * heads
    return exchanged


def _waiting_bytes(candidate: Candidate) -> Table:
    """Return upper bounds of the bytes that wait during a unit's F, and its B, [2, stages, N].

    They assume that all units have arrived, which in a run depends on time. In the looped order no
    activation waits during backwards, and no gradient during forwards; in other orders both may.
    Waiting gradients of the looped order are not counted: each takes the place of its unit's
    gradient of the loss, which has a bucket. On a single pipeline rank, waiting activations are not
    counted either: their units have no gradient of the loss yet, and its bucket has room.
    """
    ranks, workload = candidate.pipeline_parallel_degree, candidate.workload
    found: Table = np.zeros((2, candidate.num_stages, len(candidate.lengths)))
    is_looped = candidate.order == LOOPED
    if candidate.virtual_stages == 1 or (is_looped and ranks == 1):
        return found
    row_bytes = workload.model.hidden_size * workload.element_bytes
    waiting = _waiting_tokens(candidate) * (row_bytes / workload.sequence_parallel_degree)
    if is_looped:
        found[0, ::ranks] = waiting
        return found
    for rank in (0, ranks - 1):
        found[:, rank::ranks] += waiting.max()
    return found


def _waiting_tokens(candidate: Candidate) -> Table:
    """Return the tokens that wait while a unit runs on each stage of a rank, [virtual stages, N].

    Nothing waits before the first stage or after the last. If sequences are cut alike, the sequence
    of a group with the most waiting tokens counts; packed sequences count one by one.
    """
    of_sequences = candidate.sequence_lengths
    lengths = np.array([length for own in of_sequences for length in own], dtype=np.float64)
    ends = np.cumsum([len(own) for own in of_sequences])
    tokens = np.zeros((candidate.virtual_stages, len(lengths)))
    for group in sequence_groups(of_sequences, num_ranks=candidate.pipeline_parallel_degree):
        own = slice(int(ends[group.start - 1]) if group.start else 0, int(ends[group.stop - 1]))
        up_to = np.cumsum(lengths[own])
        tokens[:, own] = up_to[-1] - lengths[own]
        tokens[0, own] = up_to - lengths[own]
        tokens[-1, own] = up_to[-1] - up_to
    if candidate.packed:
        return tokens
    most: Table = tokens.reshape(len(tokens), len(of_sequences), -1).max(axis=1)
    return most
