"""Breakdown of a predicted step: seconds of each rank by cause, and the assumed rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sppo.cost.candidate import Candidate
from sppo.cost.flops import FLASH_BACKWARD_RATIO, causal_pairs, head_flops, layer_flops, pair_flops
from sppo.cost.kv import kv_compute_seconds
from sppo.cost.layer import PART_NAMES
from sppo.cost.stage_cost import (
    copy_bytes_per_s,
    message_seconds,
    stage_parts,
    stage_seconds,
)
from sppo.hardware.description import HardwareSpec
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.schedule.orders.names import LOOPED
from sppo.schedule.orders.rank_orders import sequence_groups

PARTS: Mapping[str, str] = {
    "products": "matrix products",
    "attention": "attention",
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
    candidate, costs = evaluated.candidate, evaluated.costs
    seconds = stage_seconds(candidate)
    plain = stage_parts(candidate)
    nothing_recomputed = (
        seconds.forward.sum(axis=1) + seconds.backward.sum(axis=1) + seconds.weight.sum(axis=1)
    )
    per_byte = candidate.workload.hardware.node.copy_compute_s_per_byte
    copied_bytes = costs.offload_bytes + costs.kv_offload_bytes
    beside_copies = 2 * per_byte * copied_bytes.sum(axis=1)
    carried_s = message_seconds(candidate)
    kv_compute_s = candidate.sequences * kv_compute_seconds(candidate).sum(axis=1)
    kv_gathers_s = costs.kv_recompute_s.sum(axis=1) - kv_compute_s
    own = (costs.forward_s + costs.backward_s + costs.weight_s + costs.kv_recompute_s).sum(axis=1)
    found = []
    for rank in range(candidate.pipeline_parallel_degree):
        stages = list(candidate.stages_of_rank(rank))
        parts = _summed([plain[stage] for stage in stages], sequences=candidate.sequences)
        parts["zero_collectives"] = float(nothing_recomputed[stages].sum()) - sum(parts.values())
        parts["zero_collectives"] += float(kv_gathers_s[stages].sum())
        settled_s = (_groups(candidate) - 1) * float(costs.last_reduction_wait_s[stages].sum())
        parts["zero_collectives"] += settled_s
        parts["beside_copies"] = float(beside_copies[stages].sum())
        parts["carried"] = 2 * float(carried_s[stages].sum())
        parts["recompute"] = float(own[stages].sum()) + settled_s - sum(parts.values())
        parts |= _waits(
            evaluated,
            rank=rank,
            own_s=float(own[stages].sum()),
            reduced_s=float(seconds.reduce_s[stages[1:]].sum()) + settled_s,
        )
        parts["reduce"] = float(seconds.reduce_s[stages].sum())
        parts["update"] = float(seconds.update_s[stages].sum())
        parts["bubble"] = evaluated.step_s - sum(parts.values())
        found.append({name: parts[name] for name in PARTS})
    return tuple(found)


def rates_used(evaluated: EvaluatedCandidate) -> tuple[RateUsed, ...]:
    """Return the assumed rates of the machine and their sources."""
    candidate = evaluated.candidate
    workload, hardware = candidate.workload, candidate.workload.hardware
    device, peak = hardware.device, hardware.device.flops_per_s(workload.dtype)
    products_s = attention_s = 0.0
    for parts in stage_parts(candidate):
        products_s += parts["products"]
        attention_s += parts["attention"]
    products, attention = _executed_flops(candidate)
    degree = workload.sequence_parallel_degree
    published = workload.dtype == "bf16" and not device.attention_points
    backend = device.attention_backend if published else ""
    rows: list[tuple[str, float, str, float | None]] = [
        ("matrix products", products / degree / products_s, "FLOP/s", peak),
        ("attention", attention / degree / attention_s, "FLOP/s", peak),
        ("memory bandwidth", device.memory_bytes_per_s, "B/s", None),
    ]
    devices, of_node = evaluated.degrees.num_devices, hardware.node.num_devices
    if min(devices, of_node) > 1:
        rows.append(("links inside a node", hardware.network.intra_node_bytes_per_s, "B/s", None))
    if devices > of_node:
        rows.append(("links between nodes", hardware.network.inter_node_bytes_per_s, "B/s", None))
    if hardware.node.host_memory_bytes:
        copies, _ = hardware.node.host_copy_bytes_per_s
        rows.append(("copies to and from host memory", copies, "B/s", None))
    if candidate.tier == "disk":
        rows.append(("copies to a disk", copy_bytes_per_s(candidate)[0], "B/s", None))
    return tuple(
        RateUsed(
            f"{figure} ({backend})" if figure == "attention" and backend else figure,
            value,
            unit,
            most,
            _source(hardware, figure, dtype=workload.dtype, head_size=workload.model.head_dim),
        )
        for figure, value, unit, most in rows
    )


def _source(hardware: HardwareSpec, figure: str, *, dtype: str, head_size: int) -> str:
    """Return the source of a figure: "matrix products", "attention", or as the machine names it.

    Args:
        hardware: Machine that has the figure.
        figure: Kind of work, as in `hardware.sources`.
        dtype: Type of the matrix products, attention or element-wise kernels.
        head_size: Elements per attention head.
    """
    device = hardware.device
    measured = {
        "matrix products": {point.dtype for point in device.gemm_points},
        "attention": {point.dtype for point in device.attention_points},
        "memory bandwidth": {point.dtype for point in device.elementwise_points},
    }
    if dtype in measured.get(figure, ()):
        return "measured by sppo bench"
    if device.kind == "cuda" and dtype != "bf16" and figure in ("matrix products", "attention"):
        return "fp32 without TF32, by the vendor; the share of it that kernels reach is assumed"
    if figure == "attention" and device.kind == "cuda":
        rows = device.published_rows()
        meant = [row for row in rows if row.head_size == head_size] or rows
        return "; ".join(dict.fromkeys(row.source for row in meant)) or "assumed"
    return hardware.sources.get(figure, "its hardware file")


def _summed(stages: Sequence[Mapping[str, float]], *, sequences: int) -> dict[str, float]:
    """Return the seconds of each part, summed over all passes of some stages and all sequences."""
    return {name: sequences * sum(stage[name] for stage in stages) for name in PART_NAMES}


def _groups(candidate: Candidate) -> int:
    """Return the number of groups of sequences that run one after another in the looped order."""
    if candidate.order != LOOPED:
        return 1
    ranks = candidate.pipeline_parallel_degree
    return len(sequence_groups(candidate.sequence_lengths, num_ranks=ranks))


def _waits(
    evaluated: EvaluatedCandidate, *, rank: int, own_s: float, reduced_s: float
) -> dict[str, float]:
    """Return the seconds that a rank waits or runs other ranks' units, by part.

    Args:
        evaluated: Evaluated candidate.
        rank: Pipeline rank.
        own_s: Seconds of compute of the rank's stages.
        reduced_s: Seconds of the reductions between the rank's stages, which the simulation counts
            as waits for messages.
    """
    simulated = evaluated.simulated
    return {
        "borrowed": simulated.step_s - simulated.waited_s(rank) - own_s,
        "communication": simulated.waited_s(rank, "communication") - reduced_s,
        "copy": simulated.waited_s(rank, "copy"),
    }


def _executed_flops(candidate: Candidate) -> tuple[float, float]:
    """Return the FLOPs of matrix products and of attention in all subsequences, as executed.

    Attention's backward counts the products that it recomputes; recomputed activations are left
    out.
    """
    model, length = candidate.workload.model, sum(candidate.lengths)
    parts = candidate.sample_parts
    begins, ends = parts.begins.astype(np.int64), parts.ends.astype(np.int64)
    pairs = sum(
        int(causal_pairs(begins, ends, window=model.window_of(index)).sum())
        for index in range(model.num_layers)
    )
    products = 3.0 * length * (layer_flops(model) * model.num_layers + head_flops(model))
    return products, (1 + FLASH_BACKWARD_RATIO) * pair_flops(model) * pairs
