"""Costs of each stage and unit on a machine: the tables with which schedules are simulated.

Compute seconds are sums of layers (:mod:`sppo.cost.layer`); the placement of an activation policy
adds bytes of copies and seconds of recomputation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import permutations
from math import inf
from typing import Literal, TypeVar

import numpy as np

from sppo.activations.activation_layout import MAX_BLOCKS_IN_FLIGHT_OUT
from sppo.activations.block_layout import PREFETCH_LAYERS, BlockLayout
from sppo.activations.placement import ActivationPlacement, Counts, kinds_of_rows, saved_bytes
from sppo.activations.tensor_classes import (
    ATTENTION,
    LINEAR,
    X_IN,
    chosen_bytes_per_token,
    class_bytes_per_token,
)
from sppo.cost.candidate import Candidate, of_ranks
from sppo.cost.flops import (
    FLASH_BACKWARD_RATIO,
    causal_pairs,
    linear_flops,
    pair_flops,
    partition_costs,
    recomputed_linear_flops,
    recomputed_output_flops,
)
from sppo.cost.kv import (
    kv_of_units,
    kv_offload_bytes,
    kv_recompute_seconds,
    seen_kv_of_units,
    windowed_kv_seconds,
)
from sppo.cost.layer import (
    ACCUMULATION_BYTES,
    PART_NAMES,
    PASS_NAMES,
    Parts,
    Workload,
    head_parts,
    layer_parts,
    summed,
    update_seconds,
)
from sppo.cost.layer_kinds import LayerKind, elements, is_stacked, kinds_of_model
from sppo.cost.packed_sequence import PackedSequence, parts_of_packed, parts_of_sequence
from sppo.cost.sharding.collectives import (
    REDUCE_BUCKET_BYTES,
    REDUCE_BUCKETS,
    last_reduction_seconds,
    shard_seconds,
    unit_collective_seconds,
    with_collectives,
)
from sppo.cost.sharding.weight_parts import (
    kept_parameters,
    parameters_by_copies,
    streamed_weights,
)
from sppo.cost.trainable import LORA_A, LORA_B
from sppo.hardware.description import Tier
from sppo.hardware.rates import Floats
from sppo.schedule.costs import CopyEngines, Costs, LayerCopies, Link, Links, SeenKV, Table
from sppo.schedule.orders.names import DEFERRING_WEIGHTS

_Values = TypeVar("_Values", Table, Counts)
_MOST_RANGES = {"cuda": 24}
"""Most ranges of ranks in which one rank may share units (MSP), by kind of device; no limit if
absent.

Each range takes a stream of each of torch's two pools of 32, which leaves 8 streams of each for
other uses (:mod:`sppo.parallel.mesh_shape`)."""
_SHARED_INPUTS = {
    **dict.fromkeys("qkv", "norm of x_in"),
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
    passes = {name: _of_units(table, candidate.sequences) for name, table in passes.items()}
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
        engines = _engines(candidate, state.tier)
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


def stage_costs(candidate: Candidate, placement: ActivationPlacement) -> Costs:
    """Return the costs of every action of a schedule for `candidate`.

    Args:
        candidate: Candidate to price.
        placement: Placement by the activation policy, [stages, subsequences] of each sequence.
            Recomputation runs inside B and counts in B.
    """
    plain = costs_without_activations(candidate)
    retained, offloaded = (
        _of_units(placed_bytes(placement, name, candidate=candidate), candidate.sequences)
        for name in ("retained", "offloaded")
    )
    copied = offloaded + plain.kv_offload_bytes
    disturbed_s = copied * candidate.workload.hardware.node.copy_compute_s_per_byte
    return replace(
        plain,
        forward_s=plain.forward_s + disturbed_s,
        backward_s=plain.backward_s + disturbed_s + _recompute_seconds(candidate, placement),
        activation_bytes=retained + offloaded,
        offload_bytes=offloaded,
    )


@lru_cache(maxsize=4)
def costs_without_activations(candidate: Candidate) -> Costs:
    """Return the costs of a step if saved tensors took no memory; cached, must not be modified."""
    workload, seconds = candidate.workload, stage_seconds(candidate)
    (carried_down_s, carried_up_s), stages = message_seconds(candidate), candidate.num_stages
    nothing = np.zeros_like(carried_down_s)
    tier, waits = candidate.state.tier, candidate.zero >= 2 and candidate.state.streams_gradients
    # Only layers are lent (MSP), and each device of a sequence-parallel group sends its part.
    lent, lent_trained = (
        candidate.sums_over_layers(of_kind) / workload.sequence_parallel_degree
        for of_kind in (
            lambda kind: elements(kind.shapes),
            lambda kind: elements(kind.trained_shapes),
        )
    )
    slope_linear, slope_quadratic = partition_costs(
        workload.model, workload.trainable, label_share=workload.label_share
    )
    kv_bytes, kv_gradient_bytes, passing_kv_bytes = (
        _of_units(own, candidate.sequences) for own in kv_of_units(candidate)
    )
    windows_s = _of_units(windowed_kv_seconds(candidate), candidate.sequences)
    weight_bytes, gradient_bytes = streamed_bytes(candidate)
    return Costs(
        forward_s=seconds.forward + carried_down_s,
        backward_s=seconds.backward + windows_s + carried_up_s,
        weight_s=seconds.weight,
        reduce_s=seconds.reduce_s + seconds.update_s,
        last_reduction_wait_s=last_reduction_seconds(candidate) if waits else np.zeros(stages),
        message_bytes=message_bytes(candidate),
        activation_bytes=nothing,
        offload_bytes=nothing,
        kv_offload_bytes=_of_units(kv_offload_bytes(candidate), candidate.sequences),
        kv_recompute_s=_of_units(kv_recompute_seconds(candidate), candidate.sequences),
        operand_bytes=_of_units(weight_operand_bytes(candidate), candidate.sequences),
        kv_bytes=kv_bytes,
        passing_kv_bytes=passing_kv_bytes,
        kv_gradient_bytes=kv_gradient_bytes,
        weight_bytes=lent * workload.element_bytes,
        weight_gradient_bytes=lent_trained * ACCUMULATION_BYTES,
        streamed_weight_bytes=weight_bytes,
        streamed_gradient_bytes=gradient_bytes,
        context_slope=slope_quadratic / slope_linear if slope_linear else 0.0,
        links=pipeline_links(candidate),
        copies=_engines(candidate, candidate.tier),
        state_copies=None if tier in ("device", candidate.tier) else _engines(candidate, tier),
        layer_copies=tuple(_layer_copies(candidate, stage) for stage in range(stages)),
        unit_collectives_s=unit_collective_seconds(candidate)
        if candidate.zero == 2 and candidate.schedule == "sppo_msp"
        else (),
        seen_kv=SeenKV(
            *(_of_units(table, candidate.sequences) for table in seen_kv_of_units(candidate))
        )
        if candidate.schedule == "sppo_msp"
        else None,
    )


def _recompute_seconds(candidate: Candidate, placement: ActivationPlacement) -> Table:
    """Return the seconds of recomputation in backward, [stages, units]."""
    seconds, output_share = stage_seconds(candidate), _output_share(candidate)
    share = placement.recomputed / np.array(candidate.lengths)[None, :, None]
    linear, attention = (
        _of_units(table, candidate.sequences)
        for table in (share[:, :, LINEAR] + output_share[:, None], share[:, :, ATTENTION])
    )
    result: Table = seconds.linear_recompute * linear + seconds.attention_recompute * attention
    return result


@lru_cache(maxsize=8)
def _output_share(candidate: Candidate) -> Table:
    """Return the share of the linear class that unsaved inputs take to recompute, [stages]; cached.

    A layer whose input is not saved repeats the down projection of the layer below.
    """
    layers = np.maximum(1, candidate.backward_layers)
    unsaved = 1 - np.ceil(layers / candidate.input_every) / layers
    output, again = (
        candidate.sums_over_layers(partial(flops, candidate.workload.model))
        for flops in (recomputed_output_flops, recomputed_linear_flops)
    )
    return unsaved * (output / again)


def _layer_copies(candidate: Candidate, stage: int) -> LayerCopies:
    """Return the flow of a stage's blocks: through slots to a disk, or directly to host memory.

    Layers without backward have no blocks; a stage without any block counts all of its layers.
    """
    workload = candidate.workload
    layers = candidate.layers_with_backward(stage) or candidate.stages[stage]
    layout = BlockLayout(workload.model, layers=layers, element_bytes=workload.element_bytes)
    leaving = layout.staging_slots if candidate.tier == "disk" else MAX_BLOCKS_IN_FLIGHT_OUT
    return LayerCopies(len(layers), leaving, PREFETCH_LAYERS)


@lru_cache(maxsize=8)
def row_bytes_of(candidate: Candidate) -> Table:
    """Return the bytes of a row of each tensor class in all layers of a stage, [stages, 3]; cached.

    Bytes are those of one device of the sequence-parallel group. Layers without backward save none.
    """
    workload = candidate.workload

    def class_bytes(kind: LayerKind) -> Table:
        sizes = class_bytes_per_token(
            workload.model, kind.type, element_bytes=workload.element_bytes
        )
        return sizes * kind.has_backward

    result = candidate.sums_over_layers(class_bytes)
    inputs = np.ceil(candidate.backward_layers / candidate.input_every)
    result[:, X_IN] = inputs * workload.model.hidden_size * workload.element_bytes
    return result / workload.sequence_parallel_degree


def shared_input_bytes_of(candidate: Candidate) -> Table:
    """Return the bytes of a row's layer inputs that `input_every` leaves unsaved, [stages]."""
    workload = candidate.workload
    layers = candidate.backward_layers
    sharing: Table = layers - np.ceil(layers / candidate.input_every)
    input_bytes = workload.model.hidden_size * workload.element_bytes
    return sharing * float(input_bytes) / workload.sequence_parallel_degree


@lru_cache(maxsize=8)
def chosen_bytes_of(candidate: Candidate) -> Table:
    """Return the bytes of a token's chosen experts in all layers of a stage, [stages]; cached."""
    workload = candidate.workload
    found = candidate.sums_over_layers(
        lambda kind: chosen_bytes_per_token(workload.model, kind.type) * kind.has_backward
    )
    return found / workload.sequence_parallel_degree


def placed_bytes(
    placement: ActivationPlacement,
    name: Literal["retained", "offloaded"],
    *,
    candidate: Candidate,
) -> Table:
    """Return the bytes of retained or offloaded rows of each subsequence in all layers of a stage.

    The chosen experts of all tokens are retained beside the rows of the placement.

    Args:
        placement: Placement of the candidate's activations.
        name: Which rows.
        candidate: Candidate that the subsequences belong to.

    Returns:
        Bytes on one device, [stages, subsequences].
    """
    rows: Counts = getattr(placement, name)
    found = saved_bytes(
        rows,
        recomputed=placement.recomputed,
        row_bytes=row_bytes_of(candidate),
        shared_input_bytes=shared_input_bytes_of(candidate),
    )
    if name == "retained":
        found += chosen_bytes_of(candidate)[:, None] * placement.tokens
    return found


def executed_flops(candidate: Candidate, placement: ActivationPlacement) -> int:
    """Return the FLOPs that a step of one replica executes if all labels count.

    Less :func:`ignored_flops` it is the numerator of ``hfu``. Recomputation counts, but not that of
    K and V.
    """
    return candidate.sequences * int(sum(flops_of_parts(candidate, placement)))


def flops_of_parts(candidate: Candidate, placement: ActivationPlacement) -> tuple[float, float]:
    """Return the FLOPs of products and of attention in :func:`executed_flops` of one sequence."""
    workload, parts = candidate.workload, candidate.sample_parts
    model, lengths = workload.model, np.array(candidate.lengths, dtype=np.float64)
    spans = parts.begins.astype(np.int64), parts.ends.astype(np.int64)
    products, attention = linear_flops(model, workload.trainable) * float(lengths.sum()), 0.0
    for stage, kinds in enumerate(candidate.kinds_of_layers):
        linear, again = (placement.recomputed[stage, :, name] for name in (LINEAR, ATTENTION))
        for kind, count in kinds.items():
            pairs = causal_pairs(*spans, window=kind.window).astype(np.float64)
            passes = 1 + kind.has_backward * (FLASH_BACKWARD_RATIO + again / lengths)
            attention += count * pair_flops(model) * float(parts.by_subsequence(pairs) @ passes)
            if kind.has_backward:
                products += count * recomputed_linear_flops(model, kind) * float(linear.sum())
                products += count * 2 * elements(kind.repeated) * float(lengths.sum())
    return products, attention


def kinds_of_stages(
    candidate: Candidate, placement: ActivationPlacement
) -> tuple[list[int], list[int]]:
    """Return the first stage of each kind, and the kind of each stage.

    Stages of a kind have equally many layers of each kind and the same rows; the last stage also
    has the loss.
    """
    layers: dict[frozenset[tuple[LayerKind, int]], int] = {}
    same = [
        layers.setdefault(frozenset(kinds.items()), len(layers))
        for kinds in candidate.kinds_of_layers
    ]
    is_last = np.arange(len(same)) == len(same) - 1
    tables = placement.retained, placement.offloaded, placement.recomputed
    return kinds_of_rows(*tables, np.array(same), is_last)


def copy_bytes_per_s(candidate: Candidate) -> tuple[float, float]:
    """Return the rates (D2H, H2D) of a device's offloaded tensors; 0 without a tier for them."""
    return tier_bytes_per_s(candidate, candidate.tier)


def tier_bytes_per_s(candidate: Candidate, tier: Tier) -> tuple[float, float]:
    """Return the rates (D2H, H2D) of a device's copies to and from a tier; 0 for the device itself.

    Copies between a GPU and a disk pass through the host, so the lower of both rates counts.
    """
    hardware = candidate.workload.hardware
    node, host = hardware.node, hardware.node.host_copy_bytes_per_s
    if tier == "host":
        return host
    if tier == "device":
        return 0.0, 0.0
    write, read = (
        rate / node.num_devices
        for rate in (node.disk_write_bytes_per_s, node.disk_read_bytes_per_s)
    )
    if hardware.device.kind == "cpu":
        return write, read
    return min(write, host[0]), min(read, host[1])


def _engines(candidate: Candidate, tier: Tier) -> CopyEngines:
    """Return the copy engines to and from a tier; infinitely fast if the machine lacks the tier."""
    out, back = tier_bytes_per_s(candidate, tier)
    return CopyEngines(out, back) if out > 0 and back > 0 else CopyEngines()


def message_bytes(candidate: Candidate) -> Floats:
    """Return the bytes of one activation or gradient message between stages, [units]."""
    workload, lengths = candidate.workload, np.array(candidate.lengths * candidate.sequences)
    row_bytes = workload.model.hidden_size * workload.element_bytes
    sizes: Floats = lengths * row_bytes / workload.sequence_parallel_degree
    return sizes


def message_seconds(candidate: Candidate) -> tuple[Table, Table]:
    """Return the compute seconds of the messages of forwards and of backwards, [stages, units].

    A stage receives from one neighbour and sends to the other; the first and the last stage have
    only one neighbour. Stages without backward have no gradients to send or receive.
    """
    each_s = (
        message_bytes(candidate) * candidate.workload.hardware.network.message_compute_s_per_byte
    )
    down, first = candidate.neighbours, candidate.forward_only_stages
    up = down.copy()
    if first:
        up[:first] = 0
        up[first] = min(down[first], first < len(up) - 1)
    return down[:, None] * each_s, up[:, None] * each_s


def pipeline_links(candidate: Candidate) -> Links:
    """Return the links between pipeline ranks, with each sequence-parallel group contiguous."""
    hardware, width = candidate.workload.hardware, candidate.workload.sequence_parallel_degree
    network = hardware.network
    inside = Link(network.intra_node_latency_s, network.intra_node_bytes_per_s)
    outside = Link(network.inter_node_latency_s, network.inter_node_bytes_per_s)
    ranks = range(candidate.pipeline_parallel_degree)
    node_of = [rank * width // hardware.node.num_devices for rank in ranks]
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(node_of):
        members.setdefault(node, []).append(rank)
    between = {pair: inside for ranks in members.values() for pair in permutations(ranks, 2)}
    return Links(outside, between, _MOST_RANGES.get(hardware.device.kind, inf))


def _of_units(table: _Values, sequences: int) -> _Values:
    """Repeat a table [stages, subsequences, ...] for `sequences` sequences that are cut alike."""
    return np.concatenate([table] * sequences, axis=1) if sequences > 1 else table


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
