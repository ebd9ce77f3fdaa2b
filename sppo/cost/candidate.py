"""One way to run a model on a machine: what is priced, simulated, planned and run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sppo.cost.layer import Workload
from sppo.cost.packed_sequence import (
    PackedSequence,
    SampleParts,
    parts_of_packed,
    parts_of_sequence,
)
from sppo.cost.state_tiers import ON_DEVICE, StateTiers
from sppo.hardware.description import Tier
from sppo.schedule.generators import LOOPED, Begun, order_of
from sppo.schedule.transfers.kv_placement import KVPlacement, kv_of_turns

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Degrees of parallelism, cuts, schedule and policy.

    Attributes:
        workload: Model, machine, precision, sequence parallelism.
        lengths: Tokens of every subsequence; every sequence of a step is cut alike. Of a step of
            packed sequences, of all of them, one sequence after another.
        sequences: Sequences per step of one data-parallel replica, cut so; 1 where `lengths` has
            those of all.
        pipeline_parallel_degree: Ranks of the pipeline.
        data_parallel_degree: Replicas.
        schedule: Name of the schedule.
        policy: Activation policy.
        offload_ratio: Share that every subsequence sends away; None leaves it to the policy.
        zero: How much of the state the replicas shard.
        state: Where its training state lives.
        activation_tier: Tier of offloaded activations, K and V; "nearest" is the one next to the
            device that the machine has.
        input_every: Layers that share one saved input.
        allow_partial: Whether the policy may cut a tensor class.
        spare_bytes: Device memory that activation policies leave free for shards (MSP).
        background_saves: Checkpoints are copied in memory, then written while training goes on.
        virtual_stages: Stages on each rank of the pipeline (v).
        kv: What becomes of K and V between a stage's forward and its backward, in the looped order,
            on all stages of a rank but its last; None leaves it open.
        kv_recomputed: Stages of each rank that recompute theirs instead, from inputs that stay.
        packed: The sequences of the step of a replica, where samples are packed into them.
        begun: How many forwards each rank has begun before each of its backwards, where there is no
            room for as many as the schedule begins; empty: as many as that.
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
    spare_bytes: int = 0
    background_saves: bool = False
    virtual_stages: int = 1
    kv: KVPlacement | None = "retained"
    kv_recomputed: int = 0
    packed: tuple[PackedSequence, ...] = ()
    begun: Begun = ()

    @property
    def tier(self) -> Tier:
        """Tier of offloaded activations, K and V; "device" where nothing is offloaded."""
        if self.activation_tier == "nearest":
            return self.workload.hardware.node.nearest_tier
        return self.activation_tier

    def with_packed(self, sequences: tuple[PackedSequence, ...]) -> Candidate:
        """Return the candidate with a step of other sequences."""
        lengths = tuple(chain.from_iterable(sequence.lengths for sequence in sequences))
        return replace(self, lengths=lengths, sequences=1, packed=sequences, begun=())

    @property
    def sequence_lengths(self) -> tuple[tuple[int, ...], ...]:
        """Tokens of every subsequence of every sequence of a step of one replica."""
        if self.packed:
            return tuple(sequence.lengths for sequence in self.packed)
        return (self.lengths,) * self.sequences

    @property
    def distinct_sequences(self) -> tuple[slice, ...]:
        """Return each sequence's place among `lengths`; sequences that are alike are there once."""
        if not self.packed:
            return (slice(0, len(self.lengths)),)
        ends = accumulate((len(sequence.lengths) for sequence in self.packed), initial=0)
        return tuple(slice(begin, end) for begin, end in pairwise(ends))

    @property
    def sample_parts(self) -> SampleParts:
        """Return what attention sees of each subsequence, [subsequences]."""
        return parts_of_packed(self.packed) if self.packed else parts_of_sequence(self.lengths)

    @property
    def prefixes(self) -> tuple[int, ...]:
        """Tokens of its sequence before each subsequence, [subsequences]."""
        return tuple(
            chain.from_iterable(
                accumulate(self.lengths[own][:-1], initial=0) for own in self.distinct_sequences
            )
        )

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence of a step."""
        return max(sum(self.lengths[own]) for own in self.distinct_sequences)

    @property
    def budget_bytes(self) -> int:
        """Device memory that it may fill."""
        return max(0, self.workload.hardware.device.usable_bytes - self.spare_bytes)

    @property
    def num_devices(self) -> int:
        """Devices it occupies."""
        return (
            self.pipeline_parallel_degree
            * self.data_parallel_degree
            * self.workload.sequence_parallel_degree
        )

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.pipeline_parallel_degree * self.virtual_stages

    @property
    def stages(self) -> tuple[range, ...]:
        """The layers of each stage; stage s is on rank s mod `pipeline_parallel_degree`."""
        return layers_of_stages(self.workload.model.num_layers, num_stages=self.num_stages)

    @property
    def neighbours(self) -> Counts:
        """Stages on another rank that each stage receives from or sends to, [stages]."""
        counts = np.zeros(self.num_stages, dtype=np.int64)
        if self.pipeline_parallel_degree > 1:
            counts[:-1] += 1
            counts[1:] += 1
        return counts

    def rank_of_stage(self, stage: int) -> int:
        """Return the pipeline rank that has a stage."""
        return stage % self.pipeline_parallel_degree

    def stages_of_rank(self, rank: int) -> range:
        """Return the stages of a pipeline rank, in the order of their layers."""
        return range(rank, self.num_stages, self.pipeline_parallel_degree)

    @property
    def layers_of_ranks(self) -> tuple[int, ...]:
        """Number of layers on each pipeline rank, all its stages together."""
        stages = self.stages
        return tuple(
            sum(len(stages[stage]) for stage in self.stages_of_rank(rank))
            for rank in range(self.pipeline_parallel_degree)
        )

    def kv_of_stage(self, stage: int) -> KVPlacement:
        """Return the placement of a stage's K and V between its forward and its backward."""
        if self.schedule != LOOPED or self.kv is None:
            return "retained"
        turns = kv_of_turns(self.kv, recomputed=self.kv_recomputed, turns=self.virtual_stages)
        return turns[stage // self.pipeline_parallel_degree]

    @property
    def order(self) -> str:
        """The schedule in whose order ranks run its units, if MSP cut none of them."""
        return order_of(self.schedule, num_virtual=self.virtual_stages)

    def is_last_stage(self, stage: int) -> bool:
        """Return whether a stage holds the head and the loss."""
        return stage == self.num_stages - 1


@cache
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
