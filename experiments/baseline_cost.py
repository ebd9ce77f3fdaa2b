"""Memory and step time of baseline methods, by the cost model of SPPO's own candidates.

A device holds the training state, saved activations, and the working set of one layer, which covers
the whole sequence if that is not split. With recomputation, K and V exist for one layer at a time;
gradients of K and V always do.

A method that runs layer by layer in chunks is priced as the looped order with one virtual stage per
layer, whose inputs are offloaded and whose other tensors, including K and V, are recomputed. Every
method with layer inputs in host memory is priced like this, so its copies overlap as SPPO's do.

Kernels and the loss are assumed to be as frugal as ours (attention without a score matrix, logits
in tiles). The results are therefore the best that each method can reach, not those of a given
release of a framework.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from experiments.baseline_methods import Method
from sppo.activations.placement import ActivationPlacement
from sppo.activations.policy import saved_bytes_per_token
from sppo.activations.tensor_classes import CLASSES, X_IN
from sppo.config.run import RunConfig
from sppo.cost.candidate import Candidate
from sppo.cost.kv import kv_bytes_per_token
from sppo.cost.layer import ACCUMULATION_BYTES, Workload
from sppo.cost.memory.copy_room import with_placement
from sppo.cost.memory.stage_memory import StageMemory, state_memory
from sppo.cost.memory.unit_messages import exchanged_bytes
from sppo.cost.memory.unit_working_sets import computing_bytes
from sppo.cost.memory.units_in_flight import UnitsInFlight
from sppo.cost.parameters import layer_parameters, num_parameters
from sppo.cost.stage_cost import stage_costs, stage_seconds
from sppo.cost.state_tiers import StateTiers
from sppo.cost.step_time import step_time
from sppo.hardware.description import HardwareSpec
from sppo.planning.search.choices import Degrees
from sppo.schedule.orders.names import LOOPED

CHUNKS_ON_DEVICE = 2
"""Chunks of K and V, and of their gradients, on the device for a method that keeps the others in
host memory: one in use, one being copied."""


@dataclass(frozen=True, slots=True)
class BaselineStep:
    """Step of a baseline method with one sequence per replica.

    Attributes:
        memory: Memory of the fullest device, including its part of host memory.
        step_s: Seconds of the step.
        tokens_per_s_per_gpu: Tokens per second and device.
    """

    memory: StageMemory
    step_s: float
    tokens_per_s_per_gpu: float


def fits(memory: StageMemory, *, hardware: HardwareSpec) -> bool:
    """Return whether `memory` fits on a device of `hardware` and in its share of host memory."""
    on_device = memory.device.total_bytes <= hardware.device.usable_bytes
    return on_device and host_bytes(memory) <= hardware.host_bytes_per_device


def host_bytes(memory: StageMemory) -> int:
    """Return the bytes of `memory` that are in the device's share of host memory."""
    return memory.tier_activations_bytes + memory.host_optimizer_bytes


def baseline_step(
    run: RunConfig, *, hardware: HardwareSpec, method: Method, degrees: Degrees, length: int
) -> BaselineStep:
    """Return the step of `method` with one sequence of `length` tokens per replica."""
    candidate = baseline_candidate(
        run, hardware=hardware, method=method, degrees=degrees, length=length
    )
    costs = stage_costs(
        candidate, seconds=stage_seconds(candidate), placement=_placement(candidate, method)
    )
    ranks = candidate.pipeline_parallel_degree if candidate.schedule == LOOPED else None
    step_s = step_time(costs, num_sequences=1, looped_ranks=ranks).step_s
    tokens = length * degrees.data_parallel
    return BaselineStep(
        baseline_memory(run, hardware=hardware, method=method, degrees=degrees, length=length),
        step_s,
        tokens / step_s / degrees.num_devices,
    )


def baseline_memory(
    run: RunConfig, *, hardware: HardwareSpec, method: Method, degrees: Degrees, length: int
) -> StageMemory:
    """Return the memory of the fullest device with one sequence of `length` tokens per replica."""
    candidate = baseline_candidate(
        run, hardware=hardware, method=method, degrees=degrees, length=length
    )
    return max(method_memory(candidate, method), key=lambda stage: stage.device.total_bytes)


def method_memory(candidate: Candidate, method: Method) -> tuple[StageMemory, ...]:
    """Return the memory of each stage of `method`, with the layout of `candidate`."""
    if method.chunk_tokens is None:
        return _unsplit_memory(candidate, method)
    return _chunked_memory(candidate, method)


def baseline_candidate(
    run: RunConfig, *, hardware: HardwareSpec, method: Method, degrees: Degrees, length: int
) -> Candidate:
    """Return the candidate that stands for `method` in the cost model."""
    workload = Workload(
        run.model,
        hardware,
        dtype=run.train.dtype,
        sequence_parallel_degree=degrees.sequence_parallel,
        sequence_parallel=method.mechanism,
        vocabulary_sharded=method.mechanism == "megatron",
    )
    candidate = Candidate(
        workload,
        _chunks(length, method.chunk_tokens),
        pipeline_parallel_degree=degrees.pipeline_parallel,
        data_parallel_degree=degrees.data_parallel,
        zero=method.zero,
        policy=method.policy,
    )
    if not method.uses_host:
        return candidate
    return replace(
        candidate,
        schedule=LOOPED,
        virtual_stages=run.model.num_layers,
        kv="recomputed",
        state=StateTiers(optimizer="host"),
    )


def _chunks(length: int, chunk_tokens: int | None) -> tuple[int, ...]:
    """Return lengths of chunks of `chunk_tokens`, the last possibly shorter; None: one chunk."""
    if chunk_tokens is None or chunk_tokens >= length:
        return (length,)
    whole, rest = divmod(length, chunk_tokens)
    return (chunk_tokens,) * whole + ((rest,) if rest else ())


def _placement(candidate: Candidate, method: Method) -> ActivationPlacement:
    """Return the placement of saved tensors under a method.

    A method recomputes nothing, or everything except layer inputs, which it may offload.
    """
    shape = (candidate.num_stages, len(candidate.lengths), len(CLASSES))
    tokens = np.array(candidate.lengths, dtype=np.int64)[None, :, None]
    rows = np.broadcast_to(tokens, shape).copy()
    recomputed, offloaded = np.zeros_like(rows), np.zeros_like(rows)
    if method.policy == "recompute":
        recomputed = rows.copy()
        recomputed[:, :, X_IN] = 0
    if method.uses_host:
        offloaded[:, :, X_IN] = rows[:, :, X_IN]
    return ActivationPlacement(rows - recomputed - offloaded, offloaded, recomputed)


def _chunked_memory(candidate: Candidate, method: Method) -> tuple[StageMemory, ...]:
    """Return the memory of a method that runs each layer chunk by chunk.

    Two chunks of K and V are on the device, the others in host memory.
    """
    units = UnitsInFlight(candidate)
    states = state_memory(candidate, units=units)
    placement = _placement(candidate, method)
    part = min(1.0, CHUNKS_ON_DEVICE / len(candidate.lengths))
    stages = []
    for stage in with_placement(states, candidate=candidate, placement=placement, units=units):
        device = replace(
            stage.device,
            kv_bytes=round(stage.device.kv_bytes * part),
            kv_gradients_bytes=round(stage.device.kv_gradients_bytes * part),
        )
        stages.append(_with_state_on_host(replace(stage, device=device), candidate))
    return tuple(stages)


def _unsplit_memory(candidate: Candidate, method: Method) -> tuple[StageMemory, ...]:
    """Return the memory of a method that runs whole sequences through each layer."""
    candidate = replace(candidate, schedule="sppo", virtual_stages=1, kv="retained")
    workload, length = candidate.workload, sum(candidate.lengths)
    keeps = method.policy == "retain"
    kv = kv_bytes_per_token(workload)[0] * length
    saved = saved_bytes_per_token(
        method.policy, workload.model, element_bytes=workload.element_bytes
    )
    per_layer = saved * length / workload.sequence_parallel_degree
    exchanged = _exchanged_bytes(candidate, tokens=length)
    stages = []
    for state, layers in zip(
        state_memory(candidate, units=UnitsInFlight(candidate)), candidate.stages, strict=True
    ):
        device = replace(
            state.device,
            kv_bytes=round(kv * (len(layers) if keeps else 1)),
            # Computed and consumed within one layer, so never accumulated in fp32.
            kv_gradients_bytes=round(kv),
            activations_bytes=round(per_layer * len(layers)),
            communication_bytes=state.device.communication_bytes + exchanged,
        )
        if method.uses_host or method.tiles_mlp:
            device = replace(device, working_bytes=_working_bytes(candidate, method))
        stage = replace(state, device=device)
        stages.append(_with_inputs_on_host(stage, candidate) if method.uses_host else stage)
    return tuple(stages)


def _working_bytes(candidate: Candidate, method: Method) -> int:
    """Return the largest working set of a layer and the loss, with the MLP in tiles if it is tiled.

    A tiled MLP is modelled as an untiled one of less width: both have equally large tensors if the
    width shrinks by as much as a tile has fewer tokens than the sequence.
    """
    workload = candidate.workload
    if method.tiles_mlp:
        model, tokens = workload.model, max(candidate.lengths) // workload.sequence_parallel_degree
        width = max(1, model.mlp_size * min(tokens, model.hidden_size) // max(1, tokens))
        workload = replace(workload, model=model.model_copy(update={"mlp_size": width}))
    tiled = replace(candidate, workload=workload)
    running = computing_bytes(tiled, _placement(tiled, method))
    return round(float(max(running.forward.max(), running.backward.max())))


def _with_inputs_on_host(stage: StageMemory, candidate: Candidate) -> StageMemory:
    """Return the memory of a stage with saved layer inputs and training state in host memory."""
    moved = replace(
        stage,
        device=replace(stage.device, activations_bytes=0),
        tier_activations_bytes=stage.device.activations_bytes,
    )
    return _with_state_on_host(moved, candidate)


def _with_state_on_host(stage: StageMemory, candidate: Candidate) -> StageMemory:
    """Return the memory of a stage with the training state in host memory.

    The device holds weights and gradients of two layers, one in use and one being copied, and of
    the embedding or the head.
    """
    model = candidate.workload.model
    layer = layer_parameters(model)
    held = 2 * layer + model.vocab_size * model.hidden_size
    weights = min(stage.device.weights_bytes, held * candidate.workload.element_bytes)
    gradients = min(stage.device.gradients_bytes, held * ACCUMULATION_BYTES)
    shard = num_parameters(model) // candidate.num_devices
    on_host = shard * (candidate.workload.element_bytes + ACCUMULATION_BYTES)
    return replace(
        stage,
        device=replace(
            stage.device, weights_bytes=weights, gradients_bytes=gradients, optimizer_bytes=0
        ),
        host_optimizer_bytes=stage.host_optimizer_bytes + stage.device.optimizer_bytes + on_host,
    )


def _exchanged_bytes(candidate: Candidate, *, tokens: int) -> int:
    """Return the bytes of Megatron's exchange buffers minus those of SPPO's own implementation.

    Megatron's products shard outputs, not tokens, so each device gathers the residual stream of the
    whole sequence and its gradient, and holds its part of their sums: three tensors of the whole
    sequence. SPPO's Megatron sequence parallelism holds four, so the result is negative. 0 for
    other methods.
    """
    workload = candidate.workload
    if workload.sequence_parallel != "megatron" or workload.sequence_parallel_degree == 1:
        return 0
    gathered = 3 * tokens * workload.model.hidden_size * workload.element_bytes
    return gathered - int(exchanged_bytes(candidate, np.array([float(tokens)]))[0])
