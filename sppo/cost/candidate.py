"""Candidate: one way to run a model on a machine, which the cost model prices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sppo.activations.placement import Counts
from sppo.config.model import ModelConfig
from sppo.cost.layer_kinds import LayerKind, count_kinds
from sppo.cost.packed_sequence import (
    PackedSequence,
    SampleParts,
    parts_of_packed,
    parts_of_sequence,
)
from sppo.cost.stage_layers import layers_of_stages
from sppo.cost.state_tiers import ON_DEVICE, StateTiers
from sppo.cost.trainable import Trainable, layers_with_backward, layers_without_backward
from sppo.cost.workload import Workload
from sppo.hardware.description import Tier
from sppo.schedule.costs import Costs, Table
from sppo.schedule.orders.names import LOOPED, order_of
from sppo.schedule.orders.rank_orders import ForwardsBeforeBackward
from sppo.schedule.program import generate, lower, with_copies
from sppo.schedule.schedule import Schedule
from sppo.schedule.transfers.copies import KVPlacement, WindowedKV, kv_of_turns


@dataclass(frozen=True, slots=True)
class Candidate:
    """Parallel degrees, subsequence lengths, schedule, activation policy and tiers of a run.

    Attributes:
        workload: Model, machine, precision and sequence parallelism.
        lengths: Tokens of each subsequence of a sequence, the same for all sequences of a step. If
            `packed` is not empty, of each subsequence of all packed sequences in order.
        sequences: Sequences per step of one data-parallel replica; 1 if `packed` is not empty.
        pipeline_parallel_degree: Ranks of the pipeline.
        data_parallel_degree: Data-parallel replicas.
        schedule: Name of the schedule.
        policy: Activation policy.
        offload_ratio: Fraction of its saved bytes that each subsequence offloads; None leaves the
            fraction to the policy.
        zero: ZeRO stage, 0 to 3.
        state: Tiers of weights, gradients and optimizer state.
        activation_tier: Tier of offloaded activations, K and V; "nearest" is the machine's tier
            next to the device.
        input_every: Number of layers per saved layer input.
        allow_partial: Whether the policy may treat the rows of one tensor class differently.
        background_saves: Whether checkpoints are copied in memory and written during training.
        virtual_stages: Stages on each rank of the pipeline (v).
        kv: Placement of K and V between the forward and the backward of a stage in the looped
            order, on all stages of a rank except its last; None if not yet decided.
        kv_recomputed: Number of stages of each rank that recompute K and V from retained inputs,
            whatever `kv` is.
        windowed_kv: Treatment of K and V of layers with a sliding window on stages that retain K
            and V: retained, or recomputed in the backward of each unit, beside the rows that later
            units see; None if not yet decided.
        packed: Packed sequences of one replica's step; empty if samples are not packed.
        forwards_before_backward: Number of forwards that each rank has begun before each of its
            backwards, if memory has no room for as many as the schedule begins (pacing); empty to
            follow the schedule.
    """

    workload: Workload
    lengths: tuple[int, ...]
    sequences: int = 1
    pipeline_parallel_degree: int = 1
    data_parallel_degree: int = 1
    schedule: str = "sppo"
    policy: str = "hybrid"
    offload_ratio: float | None = None
    zero: int = 1
    state: StateTiers = ON_DEVICE
    activation_tier: Tier | Literal["nearest"] = "nearest"
    input_every: int = 1
    allow_partial: bool = True
    background_saves: bool = False
    virtual_stages: int = 1
    kv: KVPlacement | None = "retained"
    kv_recomputed: int = 0
    windowed_kv: WindowedKV | None = "retained"
    packed: tuple[PackedSequence, ...] = ()
    forwards_before_backward: ForwardsBeforeBackward = ()

    @property
    def tier(self) -> Tier:
        """Tier of offloaded activations, K and V; "nearest" resolved, "device" if there is none."""
        if self.activation_tier == "nearest":
            return self.workload.hardware.node.nearest_tier
        return self.activation_tier

    def with_packed(self, sequences: tuple[PackedSequence, ...]) -> Candidate:
        """Return the candidate with `sequences` as its packed sequences, and without pacing."""
        lengths = tuple(chain.from_iterable(sequence.lengths for sequence in sequences))
        return replace(
            self, lengths=lengths, sequences=1, packed=sequences, forwards_before_backward=()
        )

    @property
    def sequence_lengths(self) -> tuple[tuple[int, ...], ...]:
        """Tokens of each subsequence of each sequence of a replica's step, [sequences][N]."""
        if self.packed:
            return tuple(sequence.lengths for sequence in self.packed)
        return (self.lengths,) * self.sequences

    @property
    def distinct_sequences(self) -> tuple[slice, ...]:
        """Slice of `lengths` of each sequence; a single slice if all sequences are cut alike."""
        if not self.packed:
            return (slice(0, len(self.lengths)),)
        ends = accumulate((len(sequence.lengths) for sequence in self.packed), initial=0)
        return tuple(slice(begin, end) for begin, end in pairwise(ends))

    @property
    def sample_parts(self) -> SampleParts:
        """Parts of samples in each subsequence, by which attention is priced."""
        return parts_of_packed(self.packed) if self.packed else parts_of_sequence(self.lengths)

    @property
    def prefixes(self) -> tuple[int, ...]:
        """Number of tokens before each subsequence in its sequence, [subsequences]."""
        return tuple(
            chain.from_iterable(
                accumulate(self.lengths[own][:-1], initial=0) for own in self.distinct_sequences
            )
        )

    @property
    def budget_bytes(self) -> int:
        """Device memory that the candidate may fill."""
        return self.workload.hardware.device.usable_bytes

    @property
    def num_devices(self) -> int:
        """Number of devices that the candidate occupies."""
        return (
            self.pipeline_parallel_degree
            * self.data_parallel_degree
            * self.workload.sequence_parallel_degree
        )

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole pipeline."""
        return self.pipeline_parallel_degree * self.virtual_stages

    @property
    def num_units(self) -> int:
        """Number of units of a step of one replica: stages x subsequences x sequences."""
        return self.num_stages * len(self.lengths) * self.sequences

    @property
    def stages(self) -> tuple[range, ...]:
        """Layers of each stage; stage s is on rank s mod `pipeline_parallel_degree`."""
        return _stages(self.workload, self.pipeline_parallel_degree, self.virtual_stages)

    @property
    def kinds_of_layers(self) -> tuple[Counter[LayerKind], ...]:
        """Number of layers of each kind in each stage."""
        return count_kinds(self.workload.model, self.workload.trainable, self.stages)

    def sums_over_layers(self, of_layer: Callable[[LayerKind], Table | float]) -> Table:
        """Return the sums over the layers of each stage of a figure of a layer, [stages, ...]."""
        sums = [
            sum(count * of_layer(kind) for kind, count in kinds.items())
            for kinds in self.kinds_of_layers
        ]
        return np.array(sums, dtype=np.float64)

    @property
    def backward_layers(self) -> Table:
        """Number of layers of each stage that have a backward, [stages]."""
        counts = [len(self.layers_with_backward(stage)) for stage in range(self.num_stages)]
        return np.array(counts, dtype=np.float64)

    def layers_with_backward(self, stage: int) -> range:
        """Return the layers of a stage that have a backward, which may be none."""
        model, trainable = self.workload.model, self.workload.trainable
        return layers_with_backward(model, trainable, layers=self.stages[stage])

    @property
    def forward_only_stages(self) -> int:
        """Number of first stages that have no layer with a backward."""
        return stages_without_backward(
            self.workload.model, self.workload.trainable, stages=self.stages
        )

    @property
    def last_backward_stages(self) -> NDArray[np.int64]:
        """Stages whose backward is the last one of their rank."""
        first = self.forward_only_stages
        return np.arange(first, min(first + self.pipeline_parallel_degree, self.num_stages))

    @property
    def neighbours(self) -> Counts:
        """Number of neighbouring stages on other ranks that each stage exchanges with, [stages]."""
        counts = np.zeros(self.num_stages, dtype=np.int64)
        if self.pipeline_parallel_degree > 1:
            counts[:-1] += 1
            counts[1:] += 1
        return counts

    @property
    def keeps_a_stack(self) -> bool:
        """True if retained tensors lie in memory allocated once, as on a CPU with one stage."""
        on_cpu = self.workload.hardware.device.kind == "cpu"
        return on_cpu and self.num_stages == 1 and self.schedule == "sppo"

    def rank_of_stage(self, stage: int) -> int:
        """Return the pipeline rank that has a stage."""
        return stage % self.pipeline_parallel_degree

    def stages_of_rank(self, rank: int) -> range:
        """Return the stages of a pipeline rank, in the order of their layers."""
        return range(rank, self.num_stages, self.pipeline_parallel_degree)

    def by_rank(self, of_stages: Table | Counts) -> Table:
        """Return a view of values of stages, [stages, ...], as [virtual stages, ranks, ...]."""
        by_rank: NDArray[Any] = of_stages
        return by_rank.reshape(-1, self.pipeline_parallel_degree, *of_stages.shape[1:])

    @property
    def kv_of_stages(self) -> tuple[KVPlacement, ...]:
        """Placement of each stage's K and V between its forward and its backward."""
        turns = kv_of_turns("retained", recomputed=0, turns=self.virtual_stages)
        if self.schedule == LOOPED and self.kv is not None:
            turns = kv_of_turns(self.kv, recomputed=self.kv_recomputed, turns=self.virtual_stages)
        return tuple(kv for kv in turns for _ in range(self.pipeline_parallel_degree))

    @property
    def recomputes_windows(self) -> tuple[bool, ...]:
        """Flags of stages that recompute K and V of layers with a sliding window, [stages]."""
        recomputes = self.windowed_kv == "recomputed"
        return tuple(recomputes and kv == "retained" for kv in self.kv_of_stages)

    @property
    def order(self) -> str:
        """Name of the schedule whose order ranks follow if MSP cuts no unit."""
        return order_of(self.schedule, num_virtual=self.virtual_stages)

    def program(self, costs: Costs, *, messages: bool = True) -> Schedule:
        """Return the program of one step of one data-parallel replica.

        Args:
            costs: Costs of the candidate's actions.
            messages: Whether to place messages; a simulation needs none.

        Raises:
            ValueError: The schedule does not support the candidate.
        """
        schedule = generate(
            self.schedule,
            num_ranks=self.pipeline_parallel_degree,
            num_virtual=self.virtual_stages,
            forwards_before_backward=self.forwards_before_backward,
            forward_only_stages=self.forward_only_stages,
            lengths=self.sequence_lengths,
            costs=costs,
        )
        return (lower if messages else with_copies)(schedule, costs=costs)

    def is_last_stage(self, stage: int) -> bool:
        """Return whether a stage holds the head and the loss."""
        return stage == self.num_stages - 1


@lru_cache(maxsize=1024)
def _stages(workload: Workload, num_ranks: int, num_virtual: int) -> tuple[range, ...]:
    """Return the layers of each stage; cached by the workload, whose hash is at hand."""
    return layers_of_stages(workload.model, num_ranks=num_ranks, num_virtual=num_virtual)


def of_ranks(candidate: Candidate, of_stages: Table | Counts) -> Table:
    """Return the sum of values over the stages of each pipeline rank, [ranks, ...].

    Args:
        candidate: Candidate that the stages belong to.
        of_stages: Value of each stage, [stages, ...].
    """
    sums: Table = candidate.by_rank(of_stages).sum(axis=0)
    return sums


def stages_without_backward(
    model: ModelConfig, trainable: Trainable, *, stages: Sequence[range]
) -> int:
    """Return the number of first stages that have no layer with a backward.

    Args:
        model: Model configuration.
        trainable: Parameters that train.
        stages: Layers of every stage.
    """
    layers = layers_without_backward(model, trainable)
    return sum(stage.stop <= layers for stage in stages)
