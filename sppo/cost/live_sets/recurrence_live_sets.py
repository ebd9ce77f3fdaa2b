"""Live sets of the recurrence of linear attention.

Legend: see below.
"""

from __future__ import annotations

from sppo.cost.linear_attention.states import state_bytes
from sppo.cost.live_sets.tensor_sizes import TensorSizes


def recurrence_forward(s: TensorSizes) -> int:
    """Return the bytes of the outputs, and of what a forward allocates beside them."""
    return s.values_bytes + _forward_tile(s)


def recurrence_backward(s: TensorSizes) -> int:
    """Return the bytes of the gradients, and of what a backward allocates beside them."""
    degree = s.workload.sequence_parallel_degree
    state = state_bytes(s.model, s.element_bytes, degree)
    return s.linear_input_bytes + state + _backward_tile(s)


def _forward_tile(s: TensorSizes) -> int:
    return 0


def _backward_tile(s: TensorSizes) -> int:
    return 0
