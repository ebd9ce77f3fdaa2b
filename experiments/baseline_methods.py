"""Baseline methods for long sequences, and their memory by the cost model of SPPO's own candidates.

- one device: every device has whole sequences; states are sharded over all devices (ZeRO-3).
- megatron: tensor and sequence parallelism inside a node, with pipeline stages across nodes.
- ulysses: one group as large as heads and devices allow; states are sharded over all devices
  (ZeRO-3).
- context parallel: ulysses with layer inputs in host memory and the MLP in tiles; what FSDP2 with
  context parallelism and offloaded checkpoints keeps (torchtitan, transformers). A ring of K and V
  in place of Ulysses is priced as Ulysses.
- upipe: context parallel, with one head of each device at a time, so tensors of attention other
  than its output have the width of these heads (Untied Ulysses, arXiv:2602.21196).
- alst: ulysses with layer inputs and the training state in host memory (ZeRO-3 offload), and the
  MLP in tiles whose number of tokens is the hidden size (Arctic Long Sequence Training,
  arXiv:2506.13996).
- fpdt: ulysses with layer inputs and the training state in host memory, and whole layers in chunks
  of 64Ki tokens. K and V of two chunks are on the device at once, the others in host memory (Fully
  Pipelined Distributed Transformer, arXiv:2408.16978; DeepSpeed's Ulysses-Offload).

A device holds the training state, saved activations, and the working set of one layer, which covers
the whole sequence if that is not split. With recomputation, K and V exist for one layer at a time;
gradients of K and V always do. A method that runs layer by layer in chunks is priced as the looped
order with one virtual stage per layer, whose inputs are offloaded and whose other tensors, K and V
too, are recomputed. Every method with layer inputs in host memory is priced like this, so its
copies overlap as SPPO's do.

Kernels and the loss are assumed to be as frugal as ours (attention without a score matrix, logits
in tiles). The results are therefore the best that each method can reach, not those of a given
release of a framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import numpy as np

from sppo.activations.placement import ActivationPlacement
from sppo.activations.policy import saved_bytes_per_token
from sppo.activations.tensor_classes import CLASSES, X_IN
from sppo.config.model import ModelConfig
from sppo.config.run import RunConfig
from sppo.cost.candidate import Candidate
from sppo.cost.kv import kv_bytes_per_token
from sppo.cost.memory.copy_room import with_placement
from sppo.cost.memory.messages import exchanged_bytes
from sppo.cost.memory.stage_memory import StageMemory
from sppo.cost.memory.state_memory import state_memory
from sppo.cost.memory.unit_working_sets import computing_bytes
from sppo.cost.parameters import layer_shapes, num_parameters
from sppo.cost.stages.stage_cost import stage_costs
from sppo.cost.state_tiers import StateTiers
from sppo.cost.step_time import step_time
from sppo.cost.workload import ACCUMULATION_BYTES, Mechanism, Workload
from sppo.hardware.description import HardwareSpec
from sppo.planning.search.choices import Degrees, divisors
from sppo.schedule.orders.names import LOOPED
from sppo.units import KIB

CHUNKS_ON_DEVICE = 2
"""Chunks of K and V, and of their gradients, on the device for a method that keeps the others in
host memory: one in use, one being copied."""


@dataclass(frozen=True, slots=True)
class Method:
    """Baseline method that does not cut sequences into units of a pipeline.

    Attributes:
        name: Name in tables.
        policy: "retain" or "recompute".
        mechanism: Kind of sequence parallelism, "ulysses" or "megatron".
        zero: ZeRO level.
        degrees: Function that returns the degrees to try, given a model and a machine.
        uses_host: Whether layer inputs are in host memory.
        state_on_host: Whether the training state is in host memory, too.
        tiles_mlp: Whether the MLP runs in tiles whose number of tokens is the hidden size.
        one_head: Whether a device computes one head at a time.
        chunk_tokens: Tokens of each chunk that passes a whole layer; None for whole sequences.
    """

    name: str
    policy: str
    mechanism: Mechanism
    zero: int
    degrees: Callable[[ModelConfig, HardwareSpec], Iterable[Degrees]]
    uses_host: bool = False
    state_on_host: bool = False
    tiles_mlp: bool = False
    one_head: bool = False
    chunk_tokens: int | None = None

    def candidate(
        self, run: RunConfig, hardware: HardwareSpec, degrees: Degrees, length: int
    ) -> Candidate:
        """Return the candidate that stands for one sequence of `length` tokens per replica."""
        workload = Workload(
            run.model,
            hardware,
            dtype=run.train.dtype,
            sequence_parallel_degree=degrees.sequence_parallel,
            sequence_parallel=self.mechanism,
            vocabulary_sharded=self.mechanism == "megatron",
        )
        whole, rest = divmod(length, self.chunk_tokens or length)
        candidate = Candidate(
            workload,
            (self.chunk_tokens or length,) * whole + ((rest,) if rest else ()),
            pipeline_parallel_degree=degrees.pipeline_parallel,
            data_parallel_degree=degrees.data_parallel,
            zero=self.zero,
            policy=self.policy,
        )
        if not self.uses_host:
            return candidate
        return replace(
            candidate,
            schedule=LOOPED,
            virtual_stages=run.model.num_layers,
            kv="recomputed",
            state=StateTiers(optimizer="host" if self.state_on_host else "device"),
        )

    def memory(self, candidate: Candidate) -> tuple[StageMemory, ...]:
        """Return the memory of each stage with the layout of `candidate`."""
        if self.chunk_tokens is None:
            return _unsplit_memory(candidate, self)
        return _chunked_memory(candidate, self)

    def fullest(self, candidate: Candidate) -> StageMemory:
        """Return the memory of the fullest device, including its part of host memory."""
        return max(self.memory(candidate), key=lambda stage: stage.device.total_bytes)

    def step_s(self, candidate: Candidate) -> float:
        """Return the seconds of a step with the layout of `candidate`."""
        placement = _placement(candidate, self)
        costs = stage_costs(candidate, placement)
        ranks = candidate.pipeline_parallel_degree if candidate.schedule == LOOPED else None
        return step_time(costs, num_sequences=1, looped_ranks=ranks).step_s


def _whole_sequences(_model: ModelConfig, hardware: HardwareSpec) -> Iterator[Degrees]:
    yield Degrees(hardware.num_devices, 1, 1)


def _inside_nodes(model: ModelConfig, hardware: HardwareSpec) -> Iterator[Degrees]:
    """Yield degrees with groups inside a node and as many equal stages as the devices allow."""
    for group in divisors(hardware.node.num_devices):
        room = hardware.num_devices // group
        if model.num_heads % group == 0:
            stages = max(n for n in divisors(model.num_layers) if n <= room)
            yield Degrees(room // stages, stages, group)


def _across_heads(model: ModelConfig, hardware: HardwareSpec) -> Iterator[Degrees]:
    group = max(n for n in divisors(model.num_heads) if n <= hardware.num_devices)
    yield Degrees(hardware.num_devices // group, 1, group)


KEEPS_EVERYTHING = "one device, no recompute"
RECOMPUTES = "one device, recompute"
MEGATRON_KEEPS = "Megatron SP, no recompute"
MEGATRON = "Megatron SP, recompute"
ULYSSES = "Ulysses, recompute"
CONTEXT_PARALLEL = "FSDP2 + context parallel"
UPIPE = "UPipe"
ALST = "ALST"
FPDT = "FPDT"
_OFFLOADING = partial(
    Method,
    policy="recompute",
    mechanism="ulysses",
    zero=3,
    degrees=_across_heads,
    uses_host=True,
)
METHODS = (
    Method(KEEPS_EVERYTHING, "retain", "ulysses", 3, _whole_sequences),
    Method(RECOMPUTES, "recompute", "ulysses", 3, _whole_sequences),
    Method(MEGATRON_KEEPS, "retain", "megatron", 1, _inside_nodes),
    Method(MEGATRON, "recompute", "megatron", 1, _inside_nodes),
    Method(ULYSSES, "recompute", "ulysses", 3, _across_heads),
    _OFFLOADING(CONTEXT_PARALLEL, tiles_mlp=True),
    _OFFLOADING(UPIPE, tiles_mlp=True, one_head=True),
    _OFFLOADING(ALST, tiles_mlp=True, state_on_host=True),
    _OFFLOADING(FPDT, state_on_host=True, chunk_tokens=64 * KIB),
)


def fits(memory: StageMemory, hardware: HardwareSpec) -> bool:
    """Return whether `memory` fits on a device of `hardware` and in its share of host memory."""
    on_device = memory.device.total_bytes <= hardware.device.usable_bytes
    return on_device and host_bytes(memory) <= hardware.host_bytes_per_device


def host_bytes(memory: StageMemory) -> int:
    """Return the bytes of `memory` that are in the device's share of host memory."""
    return memory.tier_activations_bytes + memory.host_optimizer_bytes


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
    states = state_memory(candidate)
    placement = _placement(candidate, method)
    part = min(1.0, CHUNKS_ON_DEVICE / len(candidate.lengths))
    stages = []
    for stage in with_placement(states, candidate=candidate, placement=placement):
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
    exchanged = _exchanged_bytes(candidate, method, tokens=length)
    stages = []
    for state, layers in zip(state_memory(candidate), candidate.stages, strict=True):
        saved = saved_bytes_per_token(
            method.policy, workload.model, layers=layers, element_bytes=workload.element_bytes
        )
        device = replace(
            state.device,
            kv_bytes=round(kv * (len(layers) if keeps else 1)),
            # Computed and consumed within one layer, so never accumulated in fp32.
            kv_gradients_bytes=round(kv),
            activations_bytes=round(saved * length / workload.sequence_parallel_degree),
            working_bytes=_working_bytes(candidate, method),
            communication_bytes=state.device.communication_bytes + exchanged,
        )
        stage = replace(state, device=device)
        stages.append(_with_inputs_on_host(stage, candidate, method) if method.uses_host else stage)
    return tuple(stages)


def _working_bytes(candidate: Candidate, method: Method) -> int:
    """Return the largest working set of a layer and the loss, with the MLP in tiles if it is tiled.

    A tiled MLP is modelled as an untiled one of less width: both have equally large tensors if the
    width shrinks by as much as a tile has fewer tokens than the sequence. Attention head by head
    adds its output of all heads and the gradient of that.
    """
    workload = _of_heads_at_once(candidate.workload, method)
    tokens = max(candidate.lengths) // workload.sequence_parallel_degree
    if method.tiles_mlp:
        model = workload.model
        width = max(1, model.mlp_size * min(tokens, model.hidden_size) // max(1, tokens))
        workload = replace(workload, model=model.model_copy(update={"mlp_size": width}))
    tiled = replace(candidate, workload=workload)
    running = computing_bytes(tiled, _placement(tiled, method))
    outputs = 2 * tokens * workload.hidden_row_bytes if method.one_head else 0
    return round(float(running.max())) + outputs


def _of_heads_at_once(workload: Workload, method: Method) -> Workload:
    """Return `workload` with the heads that its devices compute at a time."""
    model, heads = workload.model, workload.sequence_parallel_degree
    if not method.one_head:
        return workload
    kv_heads = max(1, model.kv_heads * heads // model.num_heads)
    return replace(
        workload, model=model.model_copy(update={"num_heads": heads, "num_kv_heads": kv_heads})
    )


def _with_inputs_on_host(stage: StageMemory, candidate: Candidate, method: Method) -> StageMemory:
    """Return the memory of a stage with saved layer inputs, and perhaps its state, on the host."""
    moved = replace(
        stage,
        device=replace(stage.device, activations_bytes=0),
        tier_activations_bytes=stage.device.activations_bytes,
    )
    return _with_state_on_host(moved, candidate) if method.state_on_host else moved


def _with_state_on_host(stage: StageMemory, candidate: Candidate) -> StageMemory:
    """Return the memory of a stage with the training state in host memory.

    The device holds weights and gradients of two layers, one in use and one being copied, and of
    the embedding or the head.
    """
    model = candidate.workload.model
    layer = sum(map(prod, layer_shapes(model, 0).values()))
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


def _exchanged_bytes(candidate: Candidate, method: Method, *, tokens: int) -> int:
    """Return the bytes of a method's exchange buffers minus those of SPPO's own implementation.

    Megatron's products shard outputs, not tokens, so each device gathers the residual stream of the
    whole sequence and its gradient, and holds its part of their sums: three tensors of the whole
    sequence. SPPO's Megatron sequence parallelism holds four, so the result is negative, as it is
    for heads that are exchanged one at a time. 0 for other methods.
    """
    workload, lengths = candidate.workload, np.array([float(tokens)])
    if workload.sequence_parallel_degree == 1:
        return 0
    if workload.sequence_parallel == "megatron":
        exchanged = 3 * tokens * workload.model.hidden_size * workload.element_bytes
    else:
        at_once = replace(candidate, workload=_of_heads_at_once(workload, method))
        exchanged = int(exchanged_bytes(at_once, lengths)[0])
    return exchanged - int(exchanged_bytes(candidate, lengths)[0])
