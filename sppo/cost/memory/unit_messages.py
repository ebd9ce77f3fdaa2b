"""Memory of a unit's messages while it runs: received, sent and exchanged tensors."""

from __future__ import annotations

import numpy as np

from sppo.cost.candidate import Candidate
from sppo.cost.memory.units_in_flight import Running
from sppo.cost.memory.waiting_stream import waiting_bytes
from sppo.schedule.costs import Table


def sent_bytes(candidate: Candidate) -> Running:
    """Return the bytes of messages, exchanges and waiting units while each unit runs.

    Messages go to and from neighbouring stages, exchanges stay in the sequence-parallel group, and
    units wait on a rank between two of its stages.
    """
    forward = backward = _bytes_by_neighbours(candidate)[candidate.neighbours]
    of_forward, of_backward = waiting_bytes(candidate)
    if of_forward:
        forward = forward.copy()
    for table, waiting in ((forward, of_forward), (backward, of_backward)):
        for stage, row in waiting.items():
            table[stage] += row
    return Running(forward, backward)


def _bytes_by_neighbours(candidate: Candidate) -> Table:
    """Return the bytes of messages and exchanges of each unit, by neighbours of a stage, [3, N]."""
    workload = candidate.workload
    lengths = np.array(candidate.lengths, dtype=np.float64)
    row_bytes = 2 * workload.model.hidden_size * workload.element_bytes  # one message each way
    sent = lengths // workload.sequence_parallel_degree * row_bytes
    found: Table = np.arange(3)[:, None] * sent + exchanged_bytes(candidate, lengths)
    return found


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
