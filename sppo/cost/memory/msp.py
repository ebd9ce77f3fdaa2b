"""Memory of the ranks of a pipeline with multiplexed sequence partitioning (MSP).

A rank holds the saved tensors of units of its own stages that it runs whole, and of shards that it
runs, whether of its own stages or as a borrower. All of them share the slots of the rank, and the
shards of each stage have tier extents of their own. More tensors are live while a shard runs than
while a unit as long runs (:mod:`sppo.cost.live_sets.shard_live_sets`).

Sequences of a program with MSP run one after another, so fewer are held at once.

All of this follows from the program, which says which units are cut and which ranks borrow them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sppo.activations.placement import ActivationPlacement
from sppo.cost.candidate import Candidate
from sppo.cost.communicators import communicators_bytes
from sppo.cost.kv import kv_tokens
from sppo.cost.memory.copy_room import (
    reserved_slots,
    slots_on_device,
    stage_blocks,
    staging_slots,
)
from sppo.cost.memory.joined_tensors import block_layout
from sppo.cost.memory.process_growth import code_bytes
from sppo.cost.memory.rank_program import RankProgram, Shard
from sppo.cost.memory.stage_memory import StageMemory, collective_bytes
from sppo.schedule.actions import UnitKey
from sppo.schedule.in_flight import sequences_in_flight
from sppo.schedule.msp_groups import msp_ranges
from sppo.schedule.schedule import Schedule

_Blocks = Mapping[UnitKey, Sequence[int]]
"""Bytes of the block of each layer, by unit."""


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
    if not schedule.msp_groups:
        return memory
    return tuple(
        _Rank(candidate, placement, schedule, rank).memory(held) for rank, held in enumerate(memory)
    )


class _Rank:
    """Memory of one rank of the pipeline under its program."""

    def __init__(
        self,
        candidate: Candidate,
        placement: ActivationPlacement,
        schedule: Schedule,
        rank: int,
    ) -> None:
        self._candidate, self._placement, self._rank = candidate, placement, rank
        self._program = RankProgram(candidate, placement, schedule, rank)
        self._own = candidate.stages_of_rank(rank)
        own = [a for a in self._program.actions if a.stage in self._own]
        self._sequences = sequences_in_flight(own)
        self._ranges = msp_ranges(schedule.msp_groups)

    def memory(self, held: StageMemory) -> StageMemory:
        """Return the memory of the rank, given its memory if it ran all units whole."""
        copies, leaving, staging, tier = self._room()
        peaks = self._program.peaks()
        workload = self._candidate.workload
        kv, gradients = (
            self._candidate.longest_sequence * of_token for of_token in kv_tokens(self._candidate)
        )
        code = code_bytes(workload, lengths=self._program.lengths)
        code -= code_bytes(workload, lengths=self._candidate.lengths)
        device = replace(
            held.device,
            kv_bytes=round(kv[self._own].sum() * self._sequences),
            kv_gradients_bytes=round(gradients[self._own].max()),
            activations_bytes=peaks.saved,
            copies_bytes=copies,
            working_bytes=peaks.working + leaving,
            communication_bytes=int(collective_bytes(self._candidate)[self._rank]) + peaks.messages,
            growth_bytes=held.device.growth_bytes + code,
            communicators_bytes=communicators_bytes(
                self._candidate, position=self._rank, ranges=self._ranges
            ),
        )
        return replace(held, device=device, tier_activations_bytes=tier, staging_bytes=staging)

    def _room(self) -> tuple[int, int, int, int]:
        """Return the bytes of device slots, of D2H sources, of staging slots, and in the tier.

        All blocks share the slots; whole units and shards of each stage have their own extents.
        """
        whole = {stage: self._whole_blocks(stage) for stage in self._own}
        shards: dict[int, dict[UnitKey, Sequence[int]]] = {}
        for shard in self._program.shards.values():
            unit = shard.sequence, shard.subsequence
            shards.setdefault(shard.stage, {})[unit] = self._shard_blocks(shard)
        blocks = [*whole.values(), *shards.values()]
        longest = max((*whole, *shards), key=lambda stage: len(self._candidate.stages[stage]))
        tier = sum(map(_tier_bytes, whole.values())) * self._sequences
        tier += sum(map(_tier_bytes, shards.values()))
        return *self._slots_bytes(longest, max(map(_largest, blocks))), tier

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
        return {a.unit: blocks[a.unit[1]] for a in self._program.whole if a.stage == stage}

    def _shard_blocks(self, shard: Shard) -> tuple[int, ...]:
        """Return the bytes of the block of each layer of a shard."""
        placed = self._program.placed(shard)
        layout = block_layout(self._candidate, stage=shard.stage)
        return layout.blocks(placed.offloaded, attention_saved=placed.attention_saved)


def _largest(blocks: _Blocks) -> int:
    """Return the bytes of the largest block of all units."""
    return max((max(sizes) for sizes in blocks.values()), default=0)


def _tier_bytes(blocks: _Blocks) -> int:
    """Return the bytes in the tier of the sequence that has the most."""
    by_sequence: dict[int, int] = {}
    for (sequence, _), sizes in blocks.items():
        by_sequence[sequence] = by_sequence.get(sequence, 0) + sum(sizes)
    return max(by_sequence.values(), default=0)
