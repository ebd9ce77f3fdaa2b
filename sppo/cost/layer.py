"""Seconds of one layer on one subsequence: matrix products, attention, element-wise work, links.

Matrix products and attention take FLOPs over the rate that the device reaches at their shape
(:mod:`sppo.hardware.rates`); element-wise kernels take bytes over the rate of each kernel
(:mod:`sppo.cost.elementwise`). A flash backward executes 2.5 times the FLOPs of its forward, the
backward of a matrix product twice those of its forward, half of them for the weight gradient, which
frozen weights do not have. Products with the factors of adapters are so thin that they take at
least the time in which memory transfers their wide operands; products of experts have few rows
each, so they take at least the time in which memory transfers the weights of all experts. Each
device of a sequence-parallel group does a g-th of all work, and the group exchanges tokens.

Legend: C tokens of a subsequence, E hidden, N query heads, K key/value heads, D head size, F MLP
width, X experts, k experts of a token, g sequence-parallel degree. Tables are [subsequences].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import reduce
from math import prod, sqrt

import numpy as np

from sppo.activations.tensor_classes import ATTENTION, LINEAR, X_IN, tensors_of
from sppo.config.model import LayerType
from sppo.cost.elementwise.layer_work import bytes_per_element, layer_work, saving_work
from sppo.cost.elementwise.mlp_work import Work
from sppo.cost.expert_products import (
    expert_kernels,
    expert_seconds,
    multiplies_at_once,
    num_tiles,
)
from sppo.cost.flops import FLASH_BACKWARD_RATIO, causal_pairs, pair_flops, recomputed_linear_names
from sppo.cost.layer_kinds import LayerKind, Shapes, elements, is_stacked
from sppo.cost.linear_attention.delta_rule import rule_seconds
from sppo.cost.packed_sequence import SampleParts
from sppo.cost.tiles import tile_tokens
from sppo.cost.trainable import (
    LORA_A,
    LORA_B,
    is_factor,
    is_whole_factor,
    trains_head,
)
from sppo.cost.workload import ACCUMULATION_BYTES, NUM_MOMENTS, Workload
from sppo.hardware.rates import Floats, Product
from sppo.schedule.costs import Table

_ACCUMULATED_BYTES = 2 * ACCUMULATION_BYTES
"""Memory traffic of a weight gradient per element and subsequence: its sum is read and written.
The addend causes none: on a CPU it is a tile that stays in the cache, on a GPU it is not stored."""

_CONVERSION_BYTES = 2 * NUM_MOMENTS * (2 + ACCUMULATION_BYTES)
"""Memory traffic of an update of a parameter whose moments are in bf16: these are converted to fp32
before it, and back after it."""

_FORWARD_KERNELS = 16
_BACKWARD_KERNELS = 36
_READS_AND_WRITES = frozenset({(LORA_A, "input"), (LORA_B, "forward")})
"""Products with factors that add to a wide tensor; the others read theirs only."""
_CLASSES = (X_IN, ATTENTION, LINEAR)
_EXCHANGES = {
    "ulysses": {"backward": 1.0, "linear_recompute": 0.0, "attention_recompute": 0.5},
    "megatron": {"backward": 1.5, "linear_recompute": 0.25, "attention_recompute": 0.0},
}
"""Communication of other passes, as multiples of a forward's exchange.

Megatron's backward mirrors the exchanges of forward and gathers both normed inputs once more;
recomputing x_mid takes one more reduction. Recomputing attention in Ulysses exchanges q and o."""


PASS_NAMES = ("forward", "backward", "weight", "linear_recompute", "attention_recompute")
"""Passes over a layer: F, the input half of B without recomputation, the weight half of B, and the
recomputation of the linear class and of attention."""
PART_NAMES = (
    *("products", "attention", "rule", "elementwise", "gradient_sums"),
    *("exchange", "launches"),
)
"""Parts of a pass: matrix products; attention kernels; the rule of linear attention; norms,
rotation, activation functions, residuals, casts and copies; reading and writing fp32 sums of weight
gradients, unless products include this traffic; communication inside a sequence-parallel group;
fixed costs of kernels."""

Parts = Mapping[str, Table]
"""Seconds of a pass over each subsequence, [subsequences], by part."""


def summed(parts: Parts) -> Table:
    """Return the seconds of a pass from those of its parts."""
    return reduce(np.add, parts.values())


def layer_parts(
    workload: Workload, parts: SampleParts, *, kind: LayerKind
) -> dict[str, dict[str, Table]]:
    """Return the seconds of each of :data:`PASS_NAMES` over one layer, by part.

    A layer without backward has only a forward, which saves nothing.

    Args:
        workload: Model, machine, precision, sequence parallelism.
        parts: Parts of samples in each subsequence.
        kind: Kind of the layer.
    """
    model, device, tokens = workload.model, workload.hardware.device, parts.tokens
    here = tokens / workload.sequence_parallel_degree
    matrices, trained = kind.matrices, kind.trained_matrices
    recomputed = kind.projections(*recomputed_linear_names(model))
    attention, attention_backward = map(
        parts.by_subsequence, _attention_seconds(workload, parts, kind=kind)
    )
    rule, rule_backward = rule_seconds(workload, kind.linear, tokens=tokens)
    works = layer_work(model, kind.type, element_bytes=workload.element_bytes, trained=kind.trained)
    elementwise = {name: _work_seconds(workload, work, tokens=here) for name, work in works.items()}
    saving = {
        index: _saving_seconds(workload, kind.type, index, tokens=here) * kind.has_backward
        for index in _CLASSES
    }
    exchange = exchange_seconds(workload, kind.type, tokens=tokens)
    times = _exchanges(workload, kind.type)
    # Each adapter multiplies by both factors, and scales what is between them.
    adapters = len(kind.recomputed_factors)
    of_experts = expert_kernels(device, kind, dtype=workload.dtype)
    tiles = num_tiles(model, device, tokens=here)
    forward_kernels = _FORWARD_KERNELS + 3 * adapters + of_experts[0] * tiles
    frozen = len(matrices) - len(trained)
    backward_kernels = _BACKWARD_KERNELS - frozen + (4 + 1 + 2) * adapters + of_experts[1] * tiles
    passes: dict[str, dict[str, Table]] = {
        "forward": {
            "products": _products(workload, matrices, tokens=here, product="forward"),
            "attention": attention,
            "rule": rule,
            "elementwise": elementwise["forward"] + sum(saving.values()),
            "exchange": exchange,
            "launches": forward_kernels * device.kernel_s,
        },
        "backward": {
            "products": _products(workload, matrices, tokens=here, product="input")
            + _products(workload, kind.repeated, tokens=here, product="forward"),
            "attention": attention_backward,
            "rule": rule_backward,
            "elementwise": elementwise["backward"],
            "exchange": exchange * times["backward"],
            "launches": backward_kernels * device.kernel_s,
        },
        "weight": {
            "products": _products(workload, trained, tokens=here, product="weight"),
            "gradient_sums": _gradient_sum_seconds(workload, trained, tokens=here),
        },
        "linear_recompute": {
            "products": _products(workload, recomputed, tokens=here, product="forward"),
            "elementwise": elementwise["linear_recompute"] - saving[LINEAR],
            "exchange": exchange * times["linear_recompute"],
        },
        "attention_recompute": {
            "attention": attention,
            "elementwise": elementwise["attention_recompute"] - saving[ATTENTION],
            "exchange": exchange * times["attention_recompute"],
        },
    }
    correction = workload.correction
    corrected = {"forward": correction.forward}
    others = correction.backward * kind.has_backward
    return {
        name: {part: own * corrected.get(name, others) for part, own in parts_s.items()}
        for name, parts_s in passes.items()
    }


def kv_seconds(
    workload: Workload, layer_type: LayerType, *, tokens: Floats, matrices: Shapes
) -> Table:
    """Return the seconds of recomputing K and V of one layer from its input, [subsequences].

    Args:
        workload: Model, machine, precision, sequence parallelism.
        layer_type: Type of the layer.
        tokens: Tokens of each subsequence.
        matrices: Weights and factors of the projections to K and V.
    """
    model = workload.model
    here = tokens / workload.sequence_parallel_degree
    # Ulysses exchanges only k and v of the tensors of a forward; Megatron gathers the tokens.
    share = model.kv_heads / (model.num_heads + model.kv_heads)
    if workload.sequence_parallel == "megatron":
        share = _EXCHANGES["megatron"]["linear_recompute"]
    work = layer_work(model, layer_type, element_bytes=workload.element_bytes, trained=())["kv"]
    seconds: Table = (
        _products(workload, matrices, tokens=here, product="forward")
        + _work_seconds(workload, work, tokens=here)
        + exchange_seconds(workload, layer_type, tokens=tokens) * share
    )
    return seconds * workload.correction.backward


def head_parts(
    workload: Workload, *, tokens: Floats, with_gradients: bool = True
) -> dict[str, Table]:
    """Return the seconds by part of the last norm, the vocabulary projection, loss and gradients.

    All run in F, tile by tile of the tokens whose label counts, so products are priced at the shape
    of a tile. An evaluation has no gradients.
    """
    model, device = workload.model, workload.hardware.device
    here = tokens * workload.label_share / workload.sequence_parallel_degree
    most = tile_tokens(model.vocab_size, element_bytes=workload.element_bytes, device=device.kind)
    tile = np.minimum(here, most)
    tiles, head = here / tile, (("head.weight", (model.vocab_size, model.hidden_size)),)
    trained = head * (with_gradients and trains_head(model, workload.trainable))
    products = _products(workload, head, tokens=tile, product="forward")
    if with_gradients:
        products = products + _products(workload, head, tokens=tile, product="input")
    products = products + _products(workload, trained, tokens=tile, product="weight")
    loss = _work_seconds(workload, [("loss_gradient", model.vocab_size)], tokens=tile)
    norms = [(model.norm, model.hidden_size), (f"{model.norm}_backward", model.hidden_size)]
    parts = {
        "products": products * tiles,
        "elementwise": loss * tiles
        + _work_seconds(workload, norms[: 1 + with_gradients], tokens=here),
        "gradient_sums": _gradient_sum_seconds(workload, trained, tokens=tile) * tiles,
    }
    return {name: seconds * workload.correction.forward for name, seconds in parts.items()}


def update_seconds(workload: Workload, *, parameters: Floats) -> Table:
    """Return the seconds of the optimizer step on `parameters` of one device."""
    work = [("adamw", 1)]
    if workload.element_bytes < ACCUMULATION_BYTES:
        work.append(("narrow", 1))
    seconds = _work_seconds(workload, work, tokens=parameters)
    if workload.moments == "bf16":
        rate = workload.hardware.device.elementwise_bytes_per_s(
            "adamw", workload.dtype, elements=parameters
        )
        seconds += parameters * _CONVERSION_BYTES / rate
    return seconds


def exchange_seconds(workload: Workload, layer_type: LayerType, *, tokens: Floats) -> Table:
    """Return the seconds of communication of a layer's forward inside a sequence-parallel group.

    Ulysses exchanges the inputs and outputs of attention: each device sends (g-1)/g of its g-th of
    the tokens. Megatron gathers and scatters the residual stream before and after attention and the
    MLP: (g-1)/g of all tokens.
    """
    degree = workload.sequence_parallel_degree
    if degree == 1:
        return np.zeros_like(tokens)
    model, hardware = workload.model, workload.hardware
    inside = degree <= hardware.node.num_devices
    network = hardware.network
    rate = network.intra_node_bytes_per_s if inside else network.inter_node_bytes_per_s
    latency = network.intra_node_latency_s if inside else network.inter_node_latency_s
    away = (degree - 1) / degree * workload.element_bytes
    if workload.sequence_parallel == "megatron":
        sent = 4 * tokens * model.hidden_size * away
    else:
        sent = tokens / degree * sum(exchanged_widths(workload, layer_type)) * away
    seconds: Table = sent / rate + 4 * latency
    return seconds


def exchanged_widths(workload: Workload, layer_type: LayerType) -> tuple[int, int]:
    """Return the elements of a token that Ulysses exchanges before and after attention.

    They are q, k and v, and o. K/V heads are repeated where there are fewer than devices. Linear
    attention has the inputs of its convolution, decays and strengths in place of q, k and v.
    """
    model, degree = workload.model, workload.sequence_parallel_degree
    linear = model.linear_attention_of(layer_type)
    if linear is not None:
        return linear.inputs_width, linear.values_width
    heads = model.num_heads + 2 * max(model.kv_heads, min(degree, model.num_heads))
    return heads * model.head_dim, model.num_heads * model.head_dim


def _exchanges(workload: Workload, layer_type: LayerType) -> Mapping[str, float]:
    """Return the communication of other passes, as multiples of that of a forward.

    Backward of linear attention exchanges its inputs again for its outputs, and again for their own
    gradients.
    """
    if not layer_type.linear:
        return _EXCHANGES[workload.sequence_parallel]
    inputs, outputs = exchanged_widths(workload, layer_type)
    backward = (3 * inputs + 2 * outputs) / (inputs + outputs)
    return {"backward": backward, "linear_recompute": 0.0, "attention_recompute": 0.0}


def attention_seconds(
    workload: Workload, parts: SampleParts, *, kind: LayerKind
) -> tuple[Table, Table]:
    """Return the seconds of attention forward and backward on one device of the group, [parts]."""
    forward, backward = _attention_seconds(workload, parts, kind=kind)
    correction = workload.correction
    return forward * correction.forward, backward * correction.backward * kind.has_backward


def _attention_seconds(
    workload: Workload, parts: SampleParts, *, kind: LayerKind
) -> tuple[Table, Table]:
    """Return the seconds of :func:`attention_seconds` without the correction, [parts]."""
    if kind.linear is not None:
        return np.zeros_like(parts.begins), np.zeros_like(parts.begins)
    model, device, window = workload.model, workload.hardware.device, kind.window
    degree, begins, ends = workload.sequence_parallel_degree, parts.begins, parts.ends
    pairs = causal_pairs(begins.astype(np.int64), ends.astype(np.int64), window=window)
    flops = pair_flops(model, kind) * pairs.astype(np.float64) / degree
    tokens = ends - begins
    keys = ends if window is None else np.minimum(ends, tokens + window)
    heads = max(1.0, model.num_heads / degree)

    def rate(*, backward: bool) -> Floats:
        return device.attention_flops_per_s(
            workload.dtype,
            queries=tokens,
            keys=keys,
            heads=heads,
            head_size=model.head_dim,
            backward=backward,
        )

    def calls_s(*, backward: bool) -> Floats:
        return device.document_seconds(workload.dtype, queries=tokens, backward=backward)

    backward: Table = FLASH_BACKWARD_RATIO * flops / rate(backward=True) + calls_s(backward=True)
    forward: Table = flops / rate(backward=False) + calls_s(backward=False)
    return forward, backward


def _products(workload: Workload, matrices: Shapes, *, tokens: Floats, product: Product) -> Table:
    """Return the seconds of products with `tokens` rows, each matrix priced at its own width.

    A device that has a factor whole beside shards of weights (Megatron) multiplies all tokens.
    """
    device, dtype = workload.hardware.device, workload.dtype
    whole = workload.sequence_parallel_degree if workload.sequence_parallel == "megatron" else 1
    priced = Counter(
        (name.split(".")[1] if is_factor(name) else "", whole if is_whole_factor(name) else 1, size)
        for name, size in matrices
    )
    seconds = np.zeros_like(tokens)
    for (factor, copies, shape), count in priced.items():
        if is_stacked(shape):
            assert workload.model.experts is not None, "a layer has stacked weights"
            seconds += count * expert_seconds(
                device,
                workload.model.experts,
                shape,
                dtype=dtype,
                element_bytes=workload.element_bytes,
                tokens=tokens,
                product=product,
            )
            continue
        rows = tokens * copies
        rate = device.gemm_flops_per_s(dtype, tokens=rows, width=sqrt(prod(shape)), product=product)
        own = count * 2 * prod(shape) * rows / rate
        if factor:
            passes = 2 if (factor, product) in _READS_AND_WRITES else 1
            moved = count * passes * max(shape) * rows * workload.element_bytes
            own = np.maximum(own, moved / device.memory_bytes_per_s)
        seconds += own
    return seconds


def _gradient_sum_seconds(workload: Workload, matrices: Shapes, *, tokens: Floats) -> Table:
    """Return the seconds of adding weight gradients to their fp32 sums, [subsequences].

    Those of experts are added for every tile of tokens.

    If products were measured, only those of experts that are multiplied at once count: the measured
    time of a weight gradient includes the addition.
    """
    device = workload.hardware.device
    if device.measured_gemm(workload.dtype):
        at_once = multiplies_at_once(device, workload.dtype)
        matrices = tuple(own for own in matrices if at_once and is_stacked(own[1]))
    stacked = elements(tuple(own for own in matrices if is_stacked(own[1])))
    added = elements(matrices) + stacked * (num_tiles(workload.model, device, tokens=tokens) - 1)
    seconds: Table = added * _ACCUMULATED_BYTES / device.memory_bytes_per_s
    return seconds


def _work_seconds(workload: Workload, work: Iterable[Work], *, tokens: Floats) -> Table:
    """Return the seconds of element-wise kernels on `tokens` of one device, [subsequences]."""
    device, seconds = workload.hardware.device, np.zeros_like(tokens)
    for kernel, width in work:
        elements = tokens * width
        rate = device.elementwise_bytes_per_s(kernel, workload.dtype, elements=elements)
        each = bytes_per_element(kernel, element_bytes=workload.element_bytes)
        seconds += elements * each / rate
    return seconds


def saving_seconds(workload: Workload, kind: LayerKind, *, tokens: Floats) -> Table:
    """Return the seconds in which the forward of a layer saves tensors, [subsequences]."""
    here = tokens / workload.sequence_parallel_degree
    saving = [_saving_seconds(workload, kind.type, index, tokens=here) for index in _CLASSES]
    seconds: Table = np.sum(saving, axis=0) * workload.correction.forward
    return seconds * kind.has_backward


def _saving_seconds(
    workload: Workload, layer_type: LayerType, index: int, *, tokens: Floats
) -> Table:
    """Return the seconds of copying one class of saved tensors onto the stack of a CPU run.

    A GPU keeps saved tensors in place. Recomputed tensors are not copied, so recomputation saves
    these seconds.
    """
    if workload.hardware.device.kind != "cpu":
        return np.zeros_like(tokens)
    model = workload.model
    names = sorted(tensors_of((index,), model, layer_type))
    return _work_seconds(workload, saving_work(model, layer_type, names=names), tokens=tokens)
