"""Compute seconds of the units of a stage: sums of the seconds of its layers, by pass and part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np

from sppo.activations.placement import Counts
from sppo.cost.candidate import Candidate, of_ranks
from sppo.cost.layer import (
    PART_NAMES,
    PASS_NAMES,
    Parts,
    head_parts,
    layer_parts,
    summed,
    update_seconds,
)
from sppo.cost.layer_kinds import LayerKind, is_stacked, kinds_of_model
from sppo.cost.packed_sequence import PackedSequence, parts_of_packed, parts_of_sequence
from sppo.cost.sharding.collectives import (
    REDUCE_BUCKET_BYTES,
    REDUCE_BUCKETS,
    last_reduction_seconds,
    shard_seconds,
    with_collectives,
)
from sppo.cost.sharding.weight_parts import kept_parameters, parameters_by_copies, streamed_weights
from sppo.cost.stages.links import copy_engines
from sppo.cost.trainable import LORA_A, LORA_B
from sppo.cost.workload import ACCUMULATION_BYTES, Workload
from sppo.schedule.costs import Table
from sppo.schedule.orders.names import DEFERRING_WEIGHTS

_Values = TypeVar("_Values", Table, Counts)
_SHARED_INPUTS = {
    **dict.fromkeys(("q", "k", "v", "attention_gate"), "norm of x_in"),
    **{f"linear_{name}": "norm of x_in" for name in ("q", "k", "v", "gate", "decay", "beta")},
    **dict.fromkeys(("gate", "up", "shared_gate", "shared_up"), "norm of x_mid"),
    **dict.fromkeys(("router", "shared_switch"), "norm of x_mid"),
    **dict.fromkeys(("expert_gate", "expert_up"), "rows of experts"),
}
"""Inputs of several projections, by projection."""


@dataclass(frozen=True, slots=True, eq=False)
class StageSeconds:
    """Seconds of each stage and unit; units are numbered through all sequences.

    Attributes:
        forward: Seconds of F in all layers, and in the head, of each stage, including collectives
            after each use (ZeRO-2 and 3), [stages, units].
        backward: Seconds of the input half of B, including attention and collectives after each
            use, without recomputation, [stages, units].
        weight: Seconds of the weight half of B, [stages, units].
        linear_recompute: Seconds of recomputing the linear class, [stages, units].
        attention_recompute: Seconds of recomputing attention, [stages, units].
        update_s: Seconds of the optimizer step of each rank, in the entry of the stage whose
            backward is its last, since the step waits for the norm of all gradients, [stages].
        reduce_s: Seconds that a rank waits for reductions after the last backward of each stage; in
            the entry of the last of them also for gathers of all updated weights, [stages].
    """

    forward: Table
    backward: Table
    weight: Table
    linear_recompute: Table
    attention_recompute: Table
    update_s: Table
    reduce_s: Table


@lru_cache(maxsize=8)
def stage_seconds(candidate: Candidate) -> StageSeconds:
    """Return the seconds of every stage and unit if all saved tensors are retained; cached.

    Raises:
        ValueError: More stages than layers.
    """
    passes = _sequence_seconds(candidate)
    if candidate.schedule in DEFERRING_WEIGHTS:
        passes["weight"] = passes["weight"] + _deferral_seconds(candidate)
    passes = {name: of_units(table, candidate.sequences) for name, table in passes.items()}
    if candidate.zero >= 2:
        passes |= with_collectives(candidate, passes)
    return StageSeconds(
        **passes, update_s=_update_seconds(candidate), reduce_s=_reduce_seconds(candidate)
    )


def weight_operand_bytes(candidate: Candidate) -> Table:
    """Return the bytes of the operands of all weight-gradient products, [stages, subsequences].

    A deferred weight half keeps its operands from its backward on, recomputed ones included: the
    gradients of all outputs, and the inputs, once for products that share an input.
    """
    workload = candidate.workload
    widths = candidate.sums_over_layers(_operand_elements)
    tokens = np.array(candidate.lengths) / workload.sequence_parallel_degree
    result: Table = widths[:, None] * tokens * workload.element_bytes
    return result


@lru_cache(maxsize=128)
def _operand_elements(kind: LayerKind) -> int:
    """Return the elements per token of the operands of a layer's weight-gradient products.

    Between the factors of an adapter, a token is as wide as the rank. A token has a row for each of
    its experts.
    """
    operands: dict[str, int] = {}
    for name, shape in kind.trained_matrices:
        rows = kind.experts_per_token if is_stacked(shape) else 1
        outputs, inputs = (rows * size for size in shape[-2:])
        projection, part = name.split(".")
        of_output, of_input = f"d_{projection}", _SHARED_INPUTS.get(projection, projection)
        if part == LORA_A:
            of_output = f"d_u of {projection}"
        elif part == LORA_B:
            of_input = f"u of {projection}"
        operands |= {of_output: outputs, of_input: inputs}
    return sum(operands.values()) * kind.has_backward


def _deferral_seconds(candidate: Candidate) -> Table:
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


def _update_seconds(candidate: Candidate) -> Table:
    """Return the seconds of each rank's optimizer step, [stages].

    They are in the entry of the stage whose backward is the last of the rank.

    With the optimizer off the device, the copies of a bucket overlap the update of another bucket:
    gradients from the device, weights to the device, and reads and writes of a disk.
    """
    workload, state = candidate.workload, candidate.state
    parameters = of_ranks(candidate, kept_parameters(candidate, shards_from=1, trained=True))
    seconds = update_seconds(workload, parameters=parameters)
    if state.offloads_optimizer:
        engines = copy_engines(candidate, state.tier)
        out, back = engines.d2h_bytes_per_s, engines.h2d_bytes_per_s
        gradients = 0 if state.streams_gradients else ACCUMULATION_BYTES
        weights = 0 if state.streams_weights else workload.element_bytes
        copies = np.maximum(parameters * gradients / out, parameters * weights / back)
        if state.optimizer == "disk":
            moved = (ACCUMULATION_BYTES + workload.moments_bytes) * parameters
            copies = moved / out + moved / back
        seconds = np.maximum(seconds, copies)
    at_end: Table = np.zeros(len(candidate.stages))
    last = candidate.last_backward_stages
    at_end[last] = seconds[last % len(seconds)]
    return at_end


def streamed_bytes(candidate: Candidate) -> tuple[Table, Table]:
    """Return the bytes of weights and of gradients that each stage streams, [stages] each, or 0.

    Weights with ZeRO-3, and gradients with ZeRO-2 and 3, count the rows of one device.
    """
    weights = streamed_weights(candidate) * candidate.workload.element_bytes
    gradients = kept_parameters(candidate, shards_from=2, trained=True) * ACCUMULATION_BYTES
    return weights, gradients * candidate.state.streams_gradients


def _sequence_seconds(candidate: Candidate) -> dict[str, Table]:
    """Return the seconds of one sequence, or of all packed sequences, [stages, subsequences]."""
    by_kind, head = _layer_and_head_parts(candidate.workload, candidate.lengths, candidate.packed)
    counts = np.array([[own[kind] for kind in by_kind] for own in candidate.kinds_of_layers])
    tables = {
        name: counts @ np.stack([summed(passes[name]) for passes in by_kind.values()])
        for name in PASS_NAMES
    }
    tables["forward"][-1] += summed(head)
    return tables


@lru_cache(maxsize=128)
def _layer_and_head_parts(
    workload: Workload, lengths: tuple[int, ...], packed: tuple[PackedSequence, ...]
) -> tuple[Mapping[LayerKind, Mapping[str, Parts]], Parts]:
    """Return the seconds of a layer of each kind by pass and part, and of the head by part.

    Cached because the result does not depend on the number of stages; must not be modified.
    """
    parts = parts_of_packed(packed) if packed else parts_of_sequence(lengths)
    by_kind = {
        kind: layer_parts(workload, parts, kind=kind)
        for kind in kinds_of_model(workload.model, workload.trainable)
    }
    return by_kind, head_parts(workload, tokens=parts.tokens)


def stage_parts(candidate: Candidate) -> tuple[Mapping[str, float], ...]:
    """Return the seconds of F, B and W of each stage by part, without recomputation and gathers.

    Returns:
        For each stage, the sums over one sequence or all packed sequences of each of
        :data:`sppo.cost.layer.PART_NAMES`.
    """
    by_kind, head = _layer_and_head_parts(candidate.workload, candidate.lengths, candidate.packed)
    found = []
    for stage, kinds in enumerate(candidate.kinds_of_layers):
        passes = [(1, head)] * candidate.is_last_stage(stage)
        for kind, count in kinds.items():
            of_layer = by_kind[kind]
            passes += [(count, of_layer[name]) for name in ("forward", "backward", "weight")]
        totals = dict.fromkeys(PART_NAMES, 0.0)
        for count, parts in passes:
            for name, seconds in parts.items():
                totals[name] += count * float(seconds.sum())
        found.append(totals)
    return tuple(found)


def _reduce_seconds(candidate: Candidate) -> Table:
    """Return the seconds a rank waits for collectives over devices with equal weights, [stages].

    The fp32 gradients of a stage are reduced to the devices that update them; with ZeRO-0 the sums
    are also gathered. The last buckets overlap the compute of the rank's next stage, unless
    gradients leave the device: gradients that leave wait for all buckets. With ZeRO-2 and 3, which
    reduce gradients after each use, only the last reduction remains. After the update, ZeRO-1 and
    2 gather the updated weights in the compute dtype; all stages of a rank count in the entry of
    the stage whose backward is its last. ZeRO-3 gathers none here.
    """
    passes = {0: 2, 1: 1}.get(candidate.zero, 0)
    gathered = candidate.workload.element_bytes if candidate.zero in (1, 2) else 0
    beside: Table = np.full(len(candidate.stages), float(REDUCE_BUCKETS * REDUCE_BUCKET_BYTES))
    last = candidate.last_backward_stages
    beside[last] = 0.0
    if candidate.state.streams_gradients:
        beside[:] = 0.0
    seconds: Table = np.zeros(len(candidate.stages))
    if candidate.zero >= 2:
        seconds = last_reduction_seconds(candidate)
    for copies, held in parameters_by_copies(candidate, trained=True).items():
        sent = passes * np.maximum(0.0, held * ACCUMULATION_BYTES - beside)
        seconds = seconds + shard_seconds(candidate, sent, copies=copies)
        updated = of_ranks(candidate, held * gathered)
        seconds[last] += shard_seconds(candidate, updated, copies=copies)[last % len(updated)]
    return seconds


def of_units(table: _Values, sequences: int) -> _Values:
    """Repeat a table [stages, subsequences, ...] for `sequences` sequences that are cut alike."""
    return np.concatenate([table] * sequences, axis=1) if sequences > 1 else table
