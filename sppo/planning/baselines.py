"""The longest sequence that fits when it is trained in other ways, on the same machine.

The same formulas as for SPPO, applied to an unsplit sequence: states, saved activations, and the
working set of one layer, which now spans the whole sequence. K and V belong to one layer at a time
where layers are recomputed, and their gradients never outlive their layer. Kernels and the loss are
taken to be as frugal as ours (attention without a score matrix, logits in tiles), so these are the
best that each way of sharding a sequence can reach, not what a given release of a framework does.

- one device: every device has whole sequences, states are sharded over all (ZeRO-3).
- megatron: tensor and sequence parallelism inside a node, with pipeline stages across nodes.
- ulysses: one group as large as heads and devices allow, states sharded over all (ZeRO-3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from sppo.activations.policy import saved_bytes_per_token
from sppo.config.model import ModelConfig
from sppo.config.run import RunConfig
from sppo.cost.candidate import Candidate
from sppo.cost.kv import kv_bytes_per_token
from sppo.cost.layer import Mechanism, Workload
from sppo.cost.memory.stage_memory import MemoryBuckets, state_memory
from sppo.cost.memory.unit_messages import exchanged_bytes
from sppo.cost.memory.units_in_flight import UnitsInFlight
from sppo.hardware.description import HardwareSpec
from sppo.planning.longest import longest_tokens
from sppo.planning.search.choices import Degrees
from sppo.planning.search.feasibility import longest_sequence


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train without cutting sequences.

    Attributes:
        name: What tables call it.
        policy: "retain" or "recompute".
        mechanism: How a layer is sharded over a group.
        zero: How much of the state is sharded.
        degrees: What it may use, from model and machine.
    """

    name: str
    policy: str
    mechanism: Mechanism
    zero: int
    degrees: Callable[[ModelConfig, HardwareSpec], Iterable[Degrees]]


@dataclass(frozen=True, slots=True)
class Baseline:
    """How far one way goes.

    Attributes:
        method: Its name.
        longest_tokens: Of a sequence, in whole Ki; 0 where not even 1Ki fits.
        degrees: With which it gets there; None for SPPO, whose solver chooses.
        largest_bucket: What takes most memory there, without "_bytes"; None for SPPO.
        paper: How far it got there in the SPPO paper; empty for other models and machines.
    """

    method: str
    longest_tokens: int
    degrees: Degrees | None = None
    largest_bucket: str | None = None
    paper: str = ""


def baselines(run: RunConfig, *, hardware: HardwareSpec) -> tuple[Baseline, ...]:
    """Every method on all of `hardware`, then SPPO under the conditions of `run`."""
    claims = _paper_claims(run, hardware)
    rows = [_baseline(run, hardware, method, claims.get(method.name, "")) for method in METHODS]
    longest = longest_sequence(run, hardware)
    return (*rows, Baseline(SPPO, longest, paper=claims.get(SPPO, "")))


def baseline_memory(
    run: RunConfig, *, hardware: HardwareSpec, method: Method, degrees: Degrees, length: int
) -> MemoryBuckets:
    """The fullest device of `method` with one sequence of `length` tokens per replica."""
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
        (length,),
        pipeline_parallel_degree=degrees.pipeline_parallel,
        data_parallel_degree=degrees.data_parallel,
        zero=method.zero,
    )
    keeps = method.policy == "retain"
    kv = kv_bytes_per_token(workload)[0] * length
    saved = saved_bytes_per_token(method.policy, run.model, element_bytes=workload.element_bytes)
    per_layer = saved * length / degrees.sequence_parallel
    exchanged = _exchanged_bytes(candidate, tokens=length)
    stages = []
    for state, layers in zip(
        state_memory(candidate, units=UnitsInFlight(candidate)), candidate.stages, strict=True
    ):
        stages.append(
            replace(
                state.device,
                kv_bytes=round(kv * (len(layers) if keeps else 1)),
                # Formed and consumed within a layer, so never summed up in fp32.
                kv_gradients_bytes=round(kv),
                activations_bytes=round(per_layer * len(layers)),
                communication_bytes=state.device.communication_bytes + exchanged,
            )
        )
    return max(stages, key=lambda device: device.total_bytes)


def _exchanged_bytes(candidate: Candidate, *, tokens: int) -> int:
    """What a Megatron group exchanges beyond what our own would.

    Its products shard outputs, not tokens, so each device gathers the residual stream of
    the whole sequence and its gradient, and has a part of their sums. Ours holds one tensor more.
    """
    workload = candidate.workload
    if workload.sequence_parallel != "megatron" or workload.sequence_parallel_degree == 1:
        return 0
    gathered = 3 * tokens * workload.model.hidden_size * workload.element_bytes
    return gathered - int(exchanged_bytes(candidate, np.array([float(tokens)]))[0])


def _baseline(run: RunConfig, hardware: HardwareSpec, method: Method, paper: str) -> Baseline:
    budget = hardware.device.usable_bytes

    def memory(degrees: Degrees, length: int) -> MemoryBuckets:
        return baseline_memory(
            run, hardware=hardware, method=method, degrees=degrees, length=length
        )

    best = Baseline(method.name, 0, paper=paper)
    for degrees in method.degrees(run.model, hardware):

        def fits(tokens: int, degrees: Degrees = degrees) -> bool:
            return memory(degrees, tokens).total_bytes <= budget

        longest = longest_tokens(fits)
        if longest > best.longest_tokens:
            largest = memory(degrees, longest).largest.removesuffix("_bytes")
            best = Baseline(method.name, longest, degrees, largest, paper)
    return best


def _whole_sequences(_model: ModelConfig, hardware: HardwareSpec) -> Iterator[Degrees]:
    yield Degrees(hardware.num_devices, 1, 1)


def _inside_nodes(model: ModelConfig, hardware: HardwareSpec) -> Iterator[Degrees]:
    """Groups inside a node, the most equal stages that the rest has room for."""
    for group in _divisors(hardware.node.num_devices):
        room = hardware.num_devices // group
        if model.num_heads % group == 0:
            stages = max(n for n in _divisors(model.num_layers) if n <= room)
            yield Degrees(room // stages, stages, group)


def _across_heads(model: ModelConfig, hardware: HardwareSpec) -> Iterator[Degrees]:
    group = max(n for n in _divisors(model.num_heads) if n <= hardware.num_devices)
    yield Degrees(hardware.num_devices // group, 1, group)


KEEPS_EVERYTHING = "one device, no recompute"
RECOMPUTES = "one device, recompute"
MEGATRON_KEEPS = "Megatron SP, no recompute"
MEGATRON = "Megatron SP, recompute"
ULYSSES = "Ulysses, recompute"
SPPO = "SPPO"
METHODS = (
    Method(KEEPS_EVERYTHING, "retain", "ulysses", 3, _whole_sequences),
    Method(RECOMPUTES, "recompute", "ulysses", 3, _whole_sequences),
    Method(MEGATRON_KEEPS, "retain", "megatron", 1, _inside_nodes),
    Method(MEGATRON, "recompute", "megatron", 1, _inside_nodes),
    Method(ULYSSES, "recompute", "ulysses", 3, _across_heads),
)


def _paper_claims(run: RunConfig, hardware: HardwareSpec) -> dict[str, str]:
    """What the paper reports for GPT-7B on 32 and 128 A100-80GB."""
    if run.model.preset != "gpt-7b" or not hardware.name.startswith("a100-80g"):
        return {}
    if hardware.num_devices == 32:
        return {
            MEGATRON: "896Ki",
            ULYSSES: f"{run.model.num_heads} ranks",
            SPPO: "1Mi",
        }
    return {SPPO: "4Mi"} if hardware.num_devices == 128 else {}


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
