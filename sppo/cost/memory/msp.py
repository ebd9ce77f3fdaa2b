"""Memory of the ranks of a pipeline with multiplexed sequence partitioning (MSP).

A rank holds the saved tensors of units of its own stages that it runs whole, and of shards that it
runs, whether of its own stages or as a borrower. The shards of each stage have slots and tier
extents separate from those of whole units. While a shard runs, these are live in addition to its
working set:

* gradients of the layer's K and V for the prefix and the unit, which every rank forms on its own;
* fp32 gradients of some parameters that are being sent to the owner;
* on a borrower, the weights of the layer and of the next one, and the layer's K and V.

Sequences of a program with MSP run one after another, so fewer are held at once.

All of this follows from the program, which says which units are cut and which ranks borrow them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

from sppo.activations.placement import ActivationPlacement, SubsequencePlacement
from sppo.cost.candidate import Candidate
from sppo.cost.kv import kv_bytes_per_token
from sppo.cost.layer import ACCUMULATION_BYTES
from sppo.cost.memory.copy_room import (
    reserved_slots,
    slots_on_device,
    stage_blocks,
    staging_slots,
)
from sppo.cost.memory.joined_tensors import block_layout, joined_bytes
from sppo.cost.memory.process_growth import code_bytes
from sppo.cost.memory.stage_memory import StageMemory, collective_bytes
from sppo.cost.memory.unit_messages import sent_bytes
from sppo.cost.memory.unit_runs import UnitRun, unit_runs
from sppo.cost.memory.unit_working_sets import loss_bytes, run_working_bytes
from sppo.cost.memory.units_in_flight import UnitsInFlight
from sppo.cost.parameters import layer_parameters, layer_shapes
from sppo.cost.stage_cost import placed_bytes
from sppo.schedule.actions import Action, ActionKind, Schedule, UnitKey
from sppo.schedule.encoding import encode
from sppo.schedule.in_flight import sequences_in_flight
from sppo.schedule.msp_groups import MspGroup, find_msp_groups

_Blocks = Mapping[UnitKey, Sequence[int]]
"""Bytes of the block of each layer, by unit."""
BORROWED_LAYERS = 2
"""Layers whose weights a borrower holds at once: one in use, and the next one being received."""
_GRADIENTS_UNDER_WAY = 3
"""Parameters whose gradients a rank holds at once: one being computed, two being sent."""


@dataclass(frozen=True, slots=True)
class _Shard:
    """MSP shard that a rank runs.

    Attributes:
        stage: Stage of the unit.
        sequence: Sequence of the unit.
        subsequence: Subsequence of the unit.
        tokens: Tokens of the shard.
        start: Tokens of the sequence before the shard.
        end: Tokens of the sequence up to the end of the unit.
    """

    stage: int
    sequence: int
    subsequence: int
    tokens: int
    start: int
    end: int


def with_msp(
    memory: tuple[StageMemory, ...],
    *,
    candidate: Candidate,
    placement: ActivationPlacement,
    schedule: Schedule,
) -> tuple[StageMemory, ...]:
    """Return the memory of each rank whose program runs whole units and shards.

    Args:
        memory: Memory of each rank if it ran all units whole.
        candidate: Candidate to price.
        placement: Placement by the activation policy.
        schedule: Schedule with the programs of a step.
    """
    groups = find_msp_groups(schedule, programs=encode(schedule))
    if not groups:
        return memory
    sequences = UnitsInFlight(candidate).sequences.tolist()
    return tuple(
        _Rank(candidate, placement, schedule, groups, rank).memory(
            held, overlapping=sequences[rank]
        )
        for rank, held in enumerate(memory)
    )


class _Rank:
    """Program and memory of one rank of the pipeline."""

    def __init__(
        self,
        candidate: Candidate,
        placement: ActivationPlacement,
        schedule: Schedule,
        groups: Mapping[int, MspGroup],
        rank: int,
    ) -> None:
        self._candidate, self._placement, self._rank = candidate, placement, rank
        self._program = schedule.programs[rank]
        self._own = candidate.stages_of_rank(rank)
        self._runs = {stage: unit_runs(candidate, placement, stage=stage) for stage in self._own}
        sent, own_stages = sent_bytes(candidate), list(self._own)
        self._sent = {
            ActionKind.F: sent.forward[own_stages].max(axis=0),
            ActionKind.B: sent.backward[own_stages].max(axis=0),
        }
        self._joined = {
            stage: int(
                joined_bytes(placement, block_layout(candidate, stage=stage), stage=stage).max()
            )
            for stage in {action.stage for action in self._program}
        }
        own = [a for a in self._program if a.stage in self._own]
        self._sequences = sequences_in_flight(own)
        forwards = [action for action in self._program if action.kind is ActionKind.F]
        self._whole = [action for action in forwards if action.num_shards == 1]
        starts = (0, *accumulate(candidate.lengths))
        self._shards: dict[tuple[int, int, int], _Shard] = {}
        offsets = schedule.unit_offsets()
        for action in forwards:
            if action.num_shards == 1:
                continue
            sequence, index = action.unit
            slot = action.stage * schedule.num_units + offsets[sequence] + index
            lengths = groups[slot].lengths
            self._shards[action.stage, sequence, index] = _Shard(
                action.stage,
                sequence,
                index,
                tokens=lengths[action.shard],
                start=starts[index] + sum(lengths[: action.shard]),
                end=starts[index + 1],
            )

    def memory(self, held: StageMemory, *, overlapping: int) -> StageMemory:
        """Return the memory of the rank.

        Args:
            held: Memory of the rank if it ran all units whole.
            overlapping: Number of sequences held at once if the rank ran all units whole.
        """
        copies, leaving, staging, tier = self._room()
        retained, working, sent, running = self._peaks()
        workload = self._candidate.workload
        code = code_bytes(workload, lengths=self._lengths())
        code -= code_bytes(workload, lengths=self._candidate.lengths)
        device = replace(
            held.device,
            kv_bytes=held.device.kv_bytes // overlapping * self._sequences,
            activations_bytes=retained,
            copies_bytes=copies,
            working_bytes=working + leaving,
            heap_bytes=round(running * workload.hardware.device.heap_share),
            communication_bytes=collective_bytes(self._candidate, rank=self._rank) + sent,
            growth_bytes=held.device.growth_bytes + code,
        )
        return replace(held, device=device, tier_activations_bytes=tier, staging_bytes=staging)

    def _peaks(self) -> tuple[int, int, int, int]:
        """Return peak bytes: retained, working sets, messages, and the largest working set alone.

        Working sets are largest while shards run, when little may be retained yet. So the figure of
        working sets is the peak of both together minus the peak of retained bytes; the figure of
        messages is likewise the further increase of the peak.
        """
        placed = self._placement
        by_unit = placed_bytes(
            placed.retained, recomputed=placed.recomputed, candidate=self._candidate
        )
        held = retained = computing = together = most = 0.0
        for action in self._program:
            if action.kind not in (ActionKind.F, ActionKind.B):
                continue
            saved = self._share(action) * by_unit[action.stage, action.unit[1]]
            if action.kind is ActionKind.F:
                held += saved
            working = self._running_bytes(action)
            running, most = held + working, max(most, working)
            retained, computing = max(retained, held), max(computing, running)
            together = max(together, running + self._sent_bytes(action))
            if action.kind is ActionKind.B:
                held -= saved
        beside, sent = computing - retained, together - computing
        return round(retained), round(beside), round(sent), round(most)

    def _share(self, action: Action) -> float:
        """Return the fraction of a unit's tokens that an action of this rank runs."""
        if action.num_shards == 1:
            return 1.0
        shard = self._shards[action.stage, *action.unit]
        return shard.tokens / self._candidate.lengths[shard.subsequence]

    def _room(self) -> tuple[int, int, int, int]:
        """Return the bytes of device slots, of D2H sources, of staging slots, and in the tier.

        The rank's own stages share the slots of whole units; each has its own extents in the tier.
        """
        whole = [self._whole_blocks(stage) for stage in self._own]
        longest = max(self._own, key=lambda stage: len(self._candidate.stages[stage]))
        rooms = [self._slots_bytes(longest, max(map(_largest, whole)))]
        tier = sum(map(_tier_bytes, whole)) * self._sequences
        for stage in sorted({shard.stage for shard in self._shards.values()}):
            blocks = {
                (shard.sequence, shard.subsequence): self._shard_blocks(shard)
                for shard in self._shards.values()
                if shard.stage == stage
            }
            rooms.append(self._slots_bytes(stage, _largest(blocks)))
            tier += _tier_bytes(blocks)
        copies, leaving, staging = map(sum, zip(*rooms, strict=True))
        return copies, leaving, staging, tier

    def _slots_bytes(self, stage: int, block_bytes: int) -> tuple[int, int, int]:
        """Return the bytes of slots on the device, of D2H sources, and of staging slots."""
        candidate = self._candidate
        layout = block_layout(candidate, stage=stage)
        slots = reserved_slots(candidate, layout)
        sources = slots_on_device(candidate, layout) - slots
        staging = staging_slots(candidate, layout)
        return slots * block_bytes, sources * block_bytes, staging * block_bytes

    def _whole_blocks(self, stage: int) -> _Blocks:
        """Return the bytes of the blocks of units of an own stage that the rank runs whole."""
        layout = block_layout(self._candidate, stage=stage)
        blocks = stage_blocks(self._placement, layout, stage=stage).tolist()
        return {a.unit: blocks[a.unit[1]] for a in self._whole if a.stage == stage}

    def _shard_blocks(self, shard: _Shard) -> tuple[int, ...]:
        """Return the bytes of the block of each layer of a shard."""
        placed = self._placed(shard)
        layout = block_layout(self._candidate, stage=shard.stage)
        return layout.blocks(placed.offloaded, attention_saved=placed.attention_saved)

    def _placed(self, shard: _Shard) -> SubsequencePlacement:
        """Return the retained, offloaded and recomputed rows of a shard."""
        tokens = self._candidate.lengths[shard.subsequence]
        retained, offloaded, recomputed = (
            (int(x), int(a), int(rest))
            for x, a, rest in (
                table[shard.stage, shard.subsequence].tolist()
                for table in (
                    self._placement.retained,
                    self._placement.offloaded,
                    self._placement.recomputed,
                )
            )
        )
        whole = SubsequencePlacement(retained, offloaded, recomputed)
        return whole.sharded((shard.tokens, tokens - shard.tokens))[0]

    def _running_bytes(self, action: Action) -> int:
        """Return the bytes of the working set of a unit or a shard, with :meth:`_beside`."""
        candidate, backward = self._candidate, action.kind is ActionKind.B
        if action.num_shards > 1:
            shard = self._shards[action.stage, *action.unit]
            rows = self._placed(shard).recomputed
            recomputed = frozenset(index for index, count in enumerate(rows) if count)
            run = UnitRun(recomputed, shard.tokens, shard.start)
            running = run_working_bytes(candidate, run, stage=shard.stage)[backward]
            running += self._beside(shard, backward=backward)
        else:
            run = self._runs[action.stage][action.unit[1]]
            running = run_working_bytes(candidate, run, stage=action.stage)[backward]
        if backward:
            running += self._joined[action.stage]
        if not backward and action.stage in self._own and candidate.is_last_stage(action.stage):
            tokens = candidate.lengths[action.unit[1]]
            running = max(running, loss_bytes(candidate.workload, tokens=tokens))
        return running

    def _sent_bytes(self, action: Action) -> float:
        """Return the bytes of messages and exchanges for the unit of an action."""
        return float(self._sent[action.kind][action.unit[1]])

    def _beside(self, shard: _Shard, *, backward: bool) -> int:
        """Return the bytes that are live in addition to the working set of a shard."""
        workload = self._candidate.workload
        kv_bytes, gradient_bytes = kv_bytes_per_token(workload)
        beside = 0
        if backward:
            # While gradients of K and V are live, those of the output projection are being sent.
            shapes = layer_shapes(workload.model)
            largest, behind = (
                max(prod(shapes[name]) for name in names) * ACCUMULATION_BYTES
                for names in (shapes, ["o.weight"])
            )
            kv_gradients = round(shard.end * gradient_bytes)
            beside += max(kv_gradients + behind, _GRADIENTS_UNDER_WAY * largest)
        if shard.stage not in self._own:
            layers = min(BORROWED_LAYERS, len(self._candidate.stages[shard.stage]))
            weights_bytes = layer_parameters(workload.model) * workload.element_bytes
            beside += layers * weights_bytes + round(shard.end * kv_bytes)
        return beside

    def _lengths(self) -> set[int]:
        """Return the distinct lengths of units and shards that the rank runs, in tokens."""
        whole = {self._candidate.lengths[action.unit[1]] for action in self._whole}
        return whole | {shard.tokens for shard in self._shards.values()}


def _largest(blocks: _Blocks) -> int:
    """Return the bytes of the largest block of all units."""
    return max((max(sizes) for sizes in blocks.values()), default=0)


def _tier_bytes(blocks: _Blocks) -> int:
    """Return the bytes in the tier of the sequence that has the most."""
    by_sequence: dict[int, int] = {}
    for (sequence, _), sizes in blocks.items():
        by_sequence[sequence] = by_sequence.get(sequence, 0) + sum(sizes)
    return max(by_sequence.values(), default=0)
