"""Breakdown of a predicted step: seconds of each rank by cause, and the assumed rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sppo.cost.flops import head_flops
from sppo.cost.layer import PART_NAMES
from sppo.cost.stages.executed_flops import flops_of_parts
from sppo.cost.stages.links import copy_bytes_per_s, message_seconds
from sppo.cost.stages.seconds import stage_parts, stage_seconds
from sppo.cost.workload import Workload
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate

PARTS: Mapping[str, str] = {
    "products": "matrix products",
    "attention": "attention",
    "rule": "delta rule",
    "elementwise": "element-wise kernels",
    "gradient_sums": "fp32 gradient sums",
    "launches": "kernel launches",
    "exchange": "sequence-parallel exchange",
    "recompute": "recomputation",
    "zero_collectives": "weights and gradients of ZeRO, not hidden",
    "beside_copies": "compute slowed by copies",
    "carried": "messages that the cores carry",
    "borrowed": "other ranks' units less own (MSP)",
    "communication": "waits for messages",
    "copy": "waits for copies",
    "bubble": "waits for other ranks",
    "reduce": "gradient reduction",
    "update": "optimizer update",
}
"""Labels of the parts of a rank's step, by name in JSON, in the order of tables."""

_COMPUTE = ("matrix products", "attention", "delta rule")


@dataclass(frozen=True, slots=True)
class RateUsed:
    """Assumed rate of the machine for one kind of work.

    Attributes:
        figure: Kind of work, such as "matrix products".
        value: Rate in `unit`; the mean over the step if the rate depends on shapes.
        unit: "FLOP/s" or "B/s".
        peak: Peak rate of the device in `unit`; None for memory, links and copies.
        source: Source of the figure.
    """

    figure: str
    value: float
    unit: str
    peak: float | None
    source: str


def step_parts(evaluated: EvaluatedCandidate) -> tuple[Mapping[str, float], ...]:
    """Return the seconds of each of :data:`PARTS` per pipeline rank, which add up to the step."""
    candidate, costs, simulated = evaluated.candidate, evaluated.costs, evaluated.simulated
    seconds, plain = stage_seconds(candidate), stage_parts(candidate)
    retained_s = (seconds.forward + seconds.backward + seconds.weight).sum(axis=1)
    own_s = costs.forward_s + costs.backward_s + costs.weight_s + costs.kv_recompute_s
    copied_bytes = (costs.offload_bytes + costs.kv_offload_bytes).sum(axis=1)
    per_byte = candidate.workload.hardware.node.copy_compute_s_per_byte
    computed = {
        name: candidate.sequences * np.array([stage[name] for stage in plain])
        for name in PART_NAMES
    }
    computed["zero_collectives"] = retained_s - sum(computed.values())
    computed["beside_copies"] = 2 * per_byte * copied_bytes
    computed["carried"] = np.sum(message_seconds(candidate), axis=(0, 2))
    computed["recompute"] = own_s.sum(axis=1) - sum(computed.values())
    found = []
    for rank in range(candidate.pipeline_parallel_degree):
        stages = [*candidate.stages_of_rank(rank)]
        parts = {name: float(table[stages].sum()) for name, table in computed.items()}
        parts["borrowed"] = simulated.step_s - simulated.waited_s(rank) - sum(parts.values())
        # Reductions between the rank's stages are waits for messages in the simulation.
        between_s = float(seconds.reduce_s[stages[1:]].sum())
        parts["communication"] = simulated.waited_s(rank, "communication") - between_s
        parts["copy"] = simulated.waited_s(rank, "copy")
        parts["reduce"] = float(seconds.reduce_s[stages].sum())
        parts["update"] = float(seconds.update_s[stages].sum())
        parts["bubble"] = evaluated.step_s - sum(parts.values())
        found.append({name: parts[name] for name in PARTS})
    return tuple(found)


def rates_used(evaluated: EvaluatedCandidate) -> tuple[RateUsed, ...]:
    """Return the assumed rates of the machine and their sources."""
    candidate = evaluated.candidate
    workload, hardware = candidate.workload, candidate.workload.hardware
    device, node, network = hardware.device, hardware.node, hardware.network
    products_s, attention_s, rule_s = (
        sum(stage[part] for stage in stage_parts(candidate))
        for part in ("products", "attention", "rule")
    )
    # Attention's backward also counts what it recomputes.
    nothing = evaluated.placement._replace(recomputed=0 * evaluated.placement.recomputed)
    products, attention, rule = flops_of_parts(candidate, nothing)
    ignored = (1 - workload.label_share) * sum(candidate.lengths)
    products -= ignored * sum(head_flops(workload.model, workload.trainable))
    degree, devices = workload.sequence_parallel_degree, evaluated.degrees.num_devices
    rates = {
        "matrix products": products / degree / products_s,
        "attention": attention / degree / attention_s,
        "memory bandwidth": device.memory_bytes_per_s,
    }
    if rule:
        rates["delta rule"] = rule / degree / rule_s
    if min(devices, node.num_devices) > 1:
        rates["links inside a node"] = network.intra_node_bytes_per_s
    if devices > node.num_devices:
        rates["links between nodes"] = network.inter_node_bytes_per_s
    if node.host_memory_bytes:
        rates["copies to and from host memory"] = node.host_copy_bytes_per_s[0]
    if candidate.tier == "disk":
        rates["copies to a disk"] = copy_bytes_per_s(candidate)[0]
    published = workload.dtype == "bf16" and not device.attention_points
    backend = f" ({device.attention_backend})" if published and device.attention_backend else ""
    peak = device.flops_per_s(workload.dtype)
    return tuple(
        RateUsed(
            figure + backend * (figure == "attention"),
            value,
            "FLOP/s" if figure in _COMPUTE else "B/s",
            peak if figure in _COMPUTE else None,
            _source(workload, figure),
        )
        for figure, value in rates.items()
    )


def _source(workload: Workload, figure: str) -> str:
    """Return the source of a figure, named as in `hardware.sources`."""
    hardware, device, dtype = workload.hardware, workload.hardware.device, workload.dtype
    measured = {
        "matrix products": {point.dtype for point in device.gemm_points},
        "attention": {point.dtype for point in device.attention_points},
        "memory bandwidth": {point.dtype for point in device.elementwise_points},
    }
    if dtype in measured.get(figure, ()):
        return "measured by sppo bench"
    if device.kind == "cuda" and dtype != "bf16" and figure in _COMPUTE:
        return "fp32 without TF32, by the vendor; the share of it that kernels reach is assumed"
    if figure == "attention" and device.kind == "cuda":
        rows = device.published_rows()
        meant = [row for row in rows if row.head_size == workload.model.head_dim] or rows
        return "; ".join(dict.fromkeys(row.source for row in meant)) or "assumed"
    return hardware.sources.get(figure, "its hardware file")
