"""Costs of each stage and unit on a machine: the tables with which schedules are simulated.

The placement of an activation policy adds bytes of copies and seconds of recomputation to the
compute seconds of the layers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

import numpy as np

from sppo.activations.activation_layout import MAX_BLOCKS_IN_FLIGHT_OUT
from sppo.activations.block_layout import PREFETCH_LAYERS, BlockLayout
from sppo.activations.placement import ActivationPlacement, kinds_of_rows
from sppo.activations.tensor_classes import ATTENTION, LINEAR
from sppo.cost.candidate import Candidate
from sppo.cost.flops import partition_costs, recomputed_linear_flops, recomputed_output_flops
from sppo.cost.kv import (
    kv_of_units,
    kv_offload_bytes,
    kv_recompute_seconds,
    seen_kv_of_units,
    windowed_kv_seconds,
)
from sppo.cost.layer_kinds import elements, patterns_of_stages
from sppo.cost.linear_attention.states import states_of_units
from sppo.cost.sharding.collectives import last_reduction_seconds, unit_collective_seconds
from sppo.cost.stages.links import copy_engines, message_bytes, message_seconds, pipeline_links
from sppo.cost.stages.saved_bytes import placed_bytes
from sppo.cost.stages.seconds import of_units, stage_seconds, streamed_bytes, weight_operand_bytes
from sppo.cost.workload import ACCUMULATION_BYTES
from sppo.schedule.costs import Costs, LayerCopies, SeenKV, Table


def stage_costs(candidate: Candidate, placement: ActivationPlacement) -> Costs:
    """Return the costs of every action of a schedule for `candidate`.

    Args:
        candidate: Candidate to price.
        placement: Placement by the activation policy, [stages, subsequences] of each sequence.
            Recomputation runs inside B and counts in B.
    """
    plain = costs_without_activations(candidate)
    retained, offloaded = (
        of_units(placed_bytes(placement, name, candidate=candidate), candidate.sequences)
        for name in ("retained", "offloaded")
    )
    states = of_units(states_of_units(candidate), candidate.sequences)
    copied = offloaded + plain.kv_offload_bytes
    disturbed_s = copied * candidate.workload.hardware.node.copy_compute_s_per_byte
    return replace(
        plain,
        forward_s=plain.forward_s + disturbed_s,
        backward_s=plain.backward_s + disturbed_s + _recompute_seconds(candidate, placement),
        activation_bytes=retained + offloaded + states,
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
        of_units(own, candidate.sequences) for own in kv_of_units(candidate)
    )
    windows_s = of_units(windowed_kv_seconds(candidate), candidate.sequences)
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
        kv_offload_bytes=of_units(kv_offload_bytes(candidate), candidate.sequences),
        kv_recompute_s=of_units(kv_recompute_seconds(candidate), candidate.sequences),
        operand_bytes=of_units(weight_operand_bytes(candidate), candidate.sequences),
        kv_bytes=kv_bytes,
        passing_kv_bytes=passing_kv_bytes,
        kv_gradient_bytes=kv_gradient_bytes,
        weight_bytes=lent * workload.element_bytes,
        weight_gradient_bytes=lent_trained * ACCUMULATION_BYTES,
        streamed_weight_bytes=weight_bytes,
        streamed_gradient_bytes=gradient_bytes,
        context_slope=slope_quadratic / slope_linear if slope_linear else 0.0,
        links=pipeline_links(candidate),
        copies=copy_engines(candidate, candidate.tier),
        state_copies=None if tier in ("device", candidate.tier) else copy_engines(candidate, tier),
        layer_copies=tuple(_layer_copies(candidate, stage) for stage in range(stages)),
        unit_collectives_s=unit_collective_seconds(candidate)
        if candidate.zero == 2 and candidate.schedule == "sppo_msp"
        else (),
        seen_kv=SeenKV(
            *(of_units(table, candidate.sequences) for table in seen_kv_of_units(candidate))
        )
        if candidate.schedule == "sppo_msp"
        else None,
    )


def _recompute_seconds(candidate: Candidate, placement: ActivationPlacement) -> Table:
    """Return the seconds of recomputation in backward, [stages, units]."""
    seconds, output_share = stage_seconds(candidate), _output_share(candidate)
    share = placement.recomputed / np.array(candidate.lengths)[None, :, None]
    linear, attention = (
        of_units(table, candidate.sequences)
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


def kinds_of_stages(
    candidate: Candidate, placement: ActivationPlacement
) -> tuple[list[int], list[int]]:
    """Return the first stage of each kind, and the kind of each stage.

    Stages of a kind have layers of equal kinds in equal order, and the same rows; the last stage
    also has the loss.
    """
    workload = candidate.workload
    same = patterns_of_stages(workload.model, workload.trainable, candidate.stages)
    is_last = np.arange(len(same)) == len(same) - 1
    tables = placement.retained, placement.offloaded, placement.recomputed
    return kinds_of_rows(*tables, np.array(same), is_last)
