"""Deferred weight gradients (zero bubble): memory and seconds of the operands of their products."""

from __future__ import annotations

import numpy as np

from sppo.cost.candidate import Candidate
from sppo.schedule.costs import Table


def weight_operand_bytes(candidate: Candidate) -> Table:
    """Return the bytes of the operands of all weight-gradient products, [stages, subsequences].

    A deferred weight half keeps its operands from its backward on, recomputed ones included: the
    gradients of all outputs, and the inputs, once for products that share an input.
    """
    workload = candidate.workload
    model = workload.model
    queries, keys = model.num_heads * model.head_dim, model.kv_heads * model.head_dim
    hidden = model.hidden_size
    inputs = 2 * hidden + queries + model.mlp_size
    outputs = queries + 2 * keys + 2 * hidden + model.mlp_size * (2 if model.gated else 1)
    layers = np.array([len(stage) for stage in candidate.stages], dtype=np.float64)
    tokens = np.array(candidate.lengths) / workload.sequence_parallel_degree
    row_bytes = (inputs + outputs) * workload.element_bytes
    result: Table = layers[:, None] * tokens * row_bytes
    return result


def deferral_seconds(candidate: Candidate) -> Table:
    """Return the seconds that deferring weight gradients adds on a CPU, [stages, subsequences].

    Products at once read operands that are still in caches. Operands of deferred products are
    written to memory and read back, saved ones copied out of the stack, which is priced as one copy
    of all of them. A GPU reads them from its memory either way.
    """
    workload = candidate.workload
    operand_bytes = weight_operand_bytes(candidate)
    if workload.hardware.device.kind != "cpu":
        return np.zeros_like(operand_bytes)
    tokens = np.array(candidate.lengths) / workload.sequence_parallel_degree
    rate = workload.hardware.device.elementwise_bytes_per_s(
        "save", workload.dtype, elements=tokens * workload.model.hidden_size
    )
    seconds: Table = 2 * operand_bytes / rate  # a copy reads and writes
    return seconds
