"""What each stage and subsequence costs on a machine: seconds and bytes, analytic.

Seconds are FLOPs over the rate a device reaches: matrix products and attention each at their
share of the peak, less for short subsequences. A flash backward executes 2.5 times its forward,
matrix products twice theirs, half of it for the weights. Element-wise work, norms and the
communication inside a stage (sequence parallelism) are not in these figures yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from sppo.config.model import ModelConfig
from sppo.planning.activation_policy import saved_bytes_per_token
from sppo.planning.flops import (
    FLASH_BACKWARD_RATIO,
    causal_pairs,
    head_flops,
    layer_flops,
    partition_costs,
)
from sppo.planning.hardware import HardwareSpec
from sppo.planning.parameters import parameter_shapes
from sppo.schedule.costs import CopyEngines, Costs, Link, Links, Table

_WIDE_BYTES = 4


@dataclass(frozen=True, slots=True)
class CostRequest:
    """What to price.

    Attributes:
        model: Its shape.
        hardware: The machine.
        lengths: Tokens of every subsequence of every sequence of one data-parallel rank.
        num_ranks: Pipeline ranks.
        num_virtual: Stages per rank.
        policy: Activation policy without copies: retain, keep_attention, recompute.
        dtype: "bf16" or "fp32".
        sequence_parallel_degree: Devices that share each subsequence.
        data_parallel_degree: Replicas that reduce gradients once per step.
    """

    model: ModelConfig
    hardware: HardwareSpec
    lengths: tuple[tuple[int, ...], ...]
    num_ranks: int = 1
    num_virtual: int = 1
    policy: str = "retain"
    dtype: str = "bf16"
    sequence_parallel_degree: int = 1
    data_parallel_degree: int = 1

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.num_ranks * self.num_virtual

    @property
    def element_bytes(self) -> int:
        """Of the compute dtype."""
        return 2 if self.dtype == "bf16" else 4


def layers_of_stages(num_layers: int, *, num_stages: int) -> tuple[range, ...]:
    """The layers of each stage: as equal as they can be, the last stages never the longer ones.

    The last stage also has the vocabulary projection, so it is the wrong place for a spare layer.

    Raises:
        ValueError: fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ValueError(
            f"{num_layers} layers on {num_stages} stages: every stage needs a layer; use at most "
            f"{num_layers} stages"
        )
    size, longer = divmod(num_layers, num_stages)
    ends = [0]
    for stage in range(num_stages):
        ends.append(ends[-1] + size + (stage < longer))
    return tuple(range(begin, end) for begin, end in zip(ends, ends[1:], strict=False))


def analytic_costs(request: CostRequest) -> Costs:
    """Costs of every action of a schedule for this request; nothing is offloaded yet.

    Raises:
        ValueError: more stages than layers, or an unknown activation policy.
    """
    stages = layers_of_stages(request.model.num_layers, num_stages=request.num_stages)
    spans = [_spans(parts) for parts in request.lengths]
    units = [span for sequence in spans for span in sequence]
    linear, attention = _forward_seconds(request, stages=stages, units=units)
    rebuild = {"retain": 0.0, "keep_attention": 1.0, "recompute": 1.0}[request.policy]
    rebuilt_attention = attention if request.policy == "recompute" else 0.0 * attention
    ratio = request.hardware.attention_efficiency / request.hardware.attention_backward_efficiency
    tokens = np.array([end - begin for begin, end in units], dtype=np.float64)
    layers = np.array([len(stage) for stage in stages], dtype=np.float64)[:, None]
    saved, kv = _bytes_per_token(request)
    share = request.sequence_parallel_degree
    weights = stage_parameters(request.model, stages=stages) / share
    slope_linear, slope_quadratic = partition_costs(request.model)
    return Costs(
        forward_s=linear + attention,
        # A rebuild happens inside B, so it is priced there; R is for programs that have one.
        backward_s=linear * (1 + rebuild)
        + FLASH_BACKWARD_RATIO * ratio * attention
        + rebuilt_attention,
        weight_s=linear,
        rebuild_s=np.zeros_like(linear),
        reduce_s=_reduce_seconds(request, weights=weights),
        message_bytes=tokens * request.model.hidden_size * request.element_bytes / share,
        activation_bytes=layers * tokens * saved / share,
        offload_bytes=np.zeros_like(linear),
        kv_bytes=layers * tokens * kv / share,
        kv_gradient_bytes=layers * tokens * kv / request.element_bytes * _WIDE_BYTES / share,
        weight_bytes=weights * request.element_bytes,
        weight_gradient_bytes=weights * _WIDE_BYTES,
        context_slope=slope_quadratic / slope_linear if slope_linear else 0.0,
        links=pipeline_links(request),
        copies=CopyEngines(request.hardware.d2h_bytes_per_s, request.hardware.h2d_bytes_per_s),
    )


def hiding_ratios(costs: Costs, *, num_subsequences: Sequence[int]) -> Table:
    """The paper's offload ratios: each unit sends away what its own forward hides.

    alpha_i * A_i = bandwidth * T_c (SPPO section 5.2), at most 1; the last subsequence of each
    sequence stays, because its backward comes at once.
    """
    hidden = costs.forward_s * costs.copies.d2h_bytes_per_s
    ratios = np.minimum(1.0, hidden / np.maximum(costs.activation_bytes, 1.0))
    ratios[:, np.cumsum(num_subsequences) - 1] = 0.0
    return ratios


def stage_parameters(model: ModelConfig, *, stages: Sequence[range]) -> Table:
    """Parameters of each stage: its layers, the embedding on the first, the head on the last."""
    shapes = parameter_shapes(model)
    counts = np.zeros(len(stages))
    stage_of = {layer: n for n, layers in enumerate(stages) for layer in layers}
    for name, shape in shapes.items():
        parts = name.split(".")
        if parts[0] == "layers":
            stage = stage_of[int(parts[1])]
        else:
            stage = 0 if parts[0] in ("embed", "positions") else len(stages) - 1
        counts[stage] += float(np.prod(shape))
    return counts


def pipeline_links(request: CostRequest) -> Links:
    """Links between pipeline ranks, with sequence-parallel devices next to each other."""
    hardware, width = request.hardware, request.sequence_parallel_degree
    inside = Link(hardware.intra_node_latency_s, hardware.intra_node_bytes_per_s)
    outside = Link(hardware.inter_node_latency_s, hardware.inter_node_bytes_per_s)
    node_of = [rank * width // hardware.devices_per_node for rank in range(request.num_ranks)]
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(node_of):
        members.setdefault(node, []).append(rank)
    between = {pair: inside for ranks in members.values() for pair in permutations(ranks, 2)}
    return Links(outside, between)


def _spans(parts: Sequence[int]) -> list[tuple[int, int]]:
    ends = np.cumsum((0, *parts)).tolist()
    return list(zip(ends, ends[1:], strict=False))


def _forward_seconds(
    request: CostRequest, *, stages: Sequence[range], units: Sequence[tuple[int, int]]
) -> tuple[Table, Table]:
    """Forward seconds in matrix products and in attention, [num_stages, num_units]."""
    model, hardware = request.model, request.hardware
    peak = hardware.flops_per_s(request.dtype) * request.sequence_parallel_degree
    layer = layer_flops(model)
    windows = [model.window_of(index) for index in range(model.num_layers)]
    linear = np.zeros((len(stages), len(units)))
    attention = np.zeros_like(linear)
    for unit, (begin, end) in enumerate(units):
        tokens = end - begin
        fill = tokens / (tokens + hardware.half_efficiency_tokens)
        pairs = {w: causal_pairs(begin, end, window=w) for w in set(windows)}
        for stage, layers in enumerate(stages):
            flops = layer.linear_flops * len(layers) * tokens
            if stage == len(stages) - 1:
                flops += head_flops(model) * tokens
            linear[stage, unit] = flops / (peak * hardware.gemm_efficiency * fill)
            seen = sum(pairs[windows[index]] for index in layers)
            reached = peak * hardware.attention_efficiency * fill
            attention[stage, unit] = layer.attention_flops * seen / reached
    return linear, attention


def _bytes_per_token(request: CostRequest) -> tuple[int, int]:
    """Bytes per token and layer of saved activations and of K/V."""
    model, element = request.model, request.element_bytes
    saved = saved_bytes_per_token(request.policy, model, element_bytes=element)
    return saved, 2 * model.kv_heads * model.head_dim * element


def _reduce_seconds(request: CostRequest, *, weights: Table) -> Table:
    """A ring all-reduce of fp32 gradients over the data-parallel replicas, once per step."""
    replicas = request.data_parallel_degree
    moved = weights * _WIDE_BYTES * 2 * (replicas - 1) / replicas
    seconds: Table = moved / request.hardware.inter_node_bytes_per_s
    return seconds
