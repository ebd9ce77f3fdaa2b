"""FLOPs, memory traffic and dependent steps of the gated delta rule of layers of linear attention.

The rule runs in chunks of c tokens (:mod:`sppo.kernels.chunked_rule`). Chunks are independent but
for the scan that passes the state from one to the next, so a scan is as many steps that depend on
each other as there are chunks, whatever the number of heads.

Gradients take twice the FLOPs of the forward. Before them, backward repeats the forward twice, for
the norm of its outputs and within tiles of tokens, and all of it but the outputs for the states
before the tiles (:mod:`sppo.model.recurrence`).

Legend: c tokens of a chunk, J key heads, H value heads, K and V sizes of a key and of a value.
"""

from __future__ import annotations

import numpy as np

from sppo.config.model import LinearAttention
from sppo.cost.tiles import CHUNK_TOKENS
from sppo.cost.workload import ACCUMULATION_BYTES, Workload
from sppo.hardware.rates import Floats
from sppo.schedule.costs import Table

_BACKWARD_RUNS = 4
"""Runs over all chunks in backward: those that it repeats, and the one that computes gradients."""


def rule_flops(linear: LinearAttention) -> int:
    """Return the FLOPs per token of the forward of the rule in one layer.

    They are those of the states without outputs, ``H (4 K V + c (2 K + 2 V)) + 2 J c K``, and of
    the outputs, ``H (2 K V + 2 c V) + 2 J c K``.
    """
    of_values = linear.value_heads * linear.value_size * (linear.key_size + CHUNK_TOKENS)
    of_keys = linear.keys_width * CHUNK_TOKENS
    return _flops_without_outputs(linear) + 2 * (of_values + of_keys)


def repeated_rule_flops(linear: LinearAttention) -> int:
    """Return the FLOPs per token that the backward of the rule in one layer repeats."""
    return 2 * rule_flops(linear) + _flops_without_outputs(linear)


def _flops_without_outputs(linear: LinearAttention) -> int:
    """Return the FLOPs per token of the states in one layer."""
    keys, values = linear.key_size, linear.value_size
    of_head = 4 * keys * values + 2 * CHUNK_TOKENS * (keys + values)
    return linear.value_heads * of_head + 2 * linear.keys_width * CHUNK_TOKENS


def rule_seconds(
    workload: Workload, linear: LinearAttention | None, *, tokens: Floats
) -> tuple[Table, Table]:
    """Return the seconds of the forward and of the backward of the rule, [subsequences] each.

    Products and the traffic of queries, keys, values, outputs and states between chunks overlap.
    Scans run after products: a scan has a block for each head, so its steps take as long however
    many heads a device has, and heads of other devices make it no shorter. Without linear
    attention, the seconds are 0.

    Args:
        workload: Model, machine, precision and sequence parallelism. Each device of a group has
            some heads of all tokens.
        linear: Linear attention of the layer.
        tokens: Tokens of each subsequence, [subsequences].
    """
    if linear is None:
        return np.zeros_like(tokens), np.zeros_like(tokens)
    device, width = workload.hardware.device, float(linear.key_size)
    rate = device.rule_flops_per_s or device.gemm_flops_per_s(
        workload.dtype, tokens=tokens, width=width, product="forward"
    )
    here, chunks = tokens / workload.sequence_parallel_degree, np.ceil(tokens / CHUNK_TOKENS)
    states = 2 * linear.values_width * linear.key_size / CHUNK_TOKENS * ACCUMULATION_BYTES
    moved = states + (linear.conv_width + linear.values_width) * workload.element_bytes
    flops, again = rule_flops(linear), repeated_rule_flops(linear)
    forward, backward = (
        np.maximum(here * of_token / rate, runs * here * moved / device.memory_bytes_per_s)
        + runs * chunks * device.rule_step_s
        for of_token, runs in ((flops, 1), (2 * flops + again, _BACKWARD_RUNS))
    )
    return forward, backward
