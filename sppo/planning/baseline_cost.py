"""Memory and step time of other ways to train, by the formulas that price SPPO's own candidates.

A device holds states, saved activations, and the working set of one layer. On an unsplit sequence
that spans all of it. K and V belong to one layer at a time where layers are recomputed, and their
gradients never outlive their layer.

What runs in chunks, layer by layer, is the looped order with a virtual stage for every layer, whose
inputs are offloaded and whose other tensors, K and V included, are recomputed. The step of every
method with inputs in host memory is priced like that, so that its copies hide as those of SPPO do.

Kernels and the loss are taken to be as frugal as ours (attention without a score matrix, logits in
tiles), so these are the best that each way can reach, not what a given release of a framework does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

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
from sppo.planning.baseline_methods import Method
from sppo.planning.search.choices import Degrees
from sppo.schedule.generators import LOOPED

CHUNKS_ON_DEVICE = 2
"""Chunks of K and V, and of their gradients, of a method that keeps the others in host memory: one
in use, one on its way."""


@dataclass(frozen=True, slots=True)
class BaselineStep:
    """One sequence of a given length on each replica.

    Attributes:
        memory: Of the fullest device, and what it has in host memory.
        step_s: Seconds of the step.
        tokens_per_s_per_gpu: Of the step.
    """

    memory: StageMemory
    step_s: float
    tokens_per_s_per_gpu: float


def fits(memory: StageMemory, *, hardware: HardwareSpec) -> bool:
    """Return whether `hardware` has so much memory on and behind each device."""
    in_host = memory.tier_activations_bytes + memory.host_optimizer_bytes
    on_device = memory.device.total_bytes <= hardware.device.usable_bytes
    return on_device and in_host <= hardware.host_bytes_per_device


def baseline_step(
    run: RunConfig, *, hardware: HardwareSpec, method: Method, degrees: Degrees, length: int
) -> BaselineStep:
    """Price a step of `method` with one sequence of `length` tokens per replica."""
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
    """The fullest device of `method` with one sequence of `length` tokens per replica."""
    candidate = baseline_candidate(
        run, hardware=hardware, method=method, degrees=degrees, length=length
    )
    return max(method_memory(candidate, method), key=lambda stage: stage.device.total_bytes)


def method_memory(candidate: Candidate, method: Method) -> tuple[StageMemory, ...]:
    """Memory of each stage of `method`, laid out as `candidate`."""
    if method.chunk_tokens is None:
        return _unsplit_memory(candidate, method)
    return _chunked_memory(candidate, method)


def baseline_candidate(
    run: RunConfig, *, hardware: HardwareSpec, method: Method, degrees: Degrees, length: int
) -> Candidate:
    """The layout of `method` in our terms."""
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
    """Lengths of equal chunks, the last one possibly shorter; one of all tokens for None."""
    if chunk_tokens is None or chunk_tokens >= length:
        return (length,)
    whole, rest = divmod(length, chunk_tokens)
    return (chunk_tokens,) * whole + ((rest,) if rest else ())


def _placement(candidate: Candidate, method: Method) -> ActivationPlacement:
    """Return the placement of saved tensors: nothing recomputed, or all but layer inputs."""
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
    """Memory of a method that runs a layer chunk by chunk, all but two chunks of K and V away."""
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
    """Memory of a method that has whole sequences in a layer."""
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
            # Formed and consumed within a layer, so never summed up in fp32.
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
    """The largest working set of a layer and of the loss, the MLP in tiles where it runs in them.

    An MLP in tiles has tensors as large as one that is as much narrower as a tile has fewer tokens.
    """
    workload = candidate.workload
    if method.tiles_mlp:
        model, tokens = workload.model, max(candidate.lengths) // workload.sequence_parallel_degree
        width = max(1, model.mlp_size * min(tokens, model.hidden_size) // max(1, tokens))
        workload = replace(workload, model=model.model_copy(update={"mlp_size": width}))
    tiled = replace(candidate, workload=workload)
    return round(float(computing_bytes(tiled, _placement(tiled, method)).most.max()))


def _with_inputs_on_host(stage: StageMemory, candidate: Candidate) -> StageMemory:
    """Memory of a stage whose layer inputs are in host memory, but for the running layer's."""
    moved = replace(
        stage,
        device=replace(stage.device, activations_bytes=0),
        tier_activations_bytes=stage.device.activations_bytes,
    )
    return _with_state_on_host(moved, candidate)


def _with_state_on_host(stage: StageMemory, candidate: Candidate) -> StageMemory:
    """Memory with weights and gradients on the device for no more than is computed with.

    These are two layers, one in use and one that comes or goes, and the embedding or the head.
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
    """Return the bytes that a Megatron group exchanges beyond our own.

    Its products shard outputs, not tokens, so each device gathers the residual stream of
    the whole sequence and its gradient, and has a part of their sums. Ours holds one tensor more.
    """
    workload = candidate.workload
    if workload.sequence_parallel != "megatron" or workload.sequence_parallel_degree == 1:
        return 0
    gathered = 3 * tokens * workload.model.hidden_size * workload.element_bytes
    return gathered - int(exchanged_bytes(candidate, np.array([float(tokens)]))[0])
