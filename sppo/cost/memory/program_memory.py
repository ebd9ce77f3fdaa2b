"""Memory of the ranks of a pipeline under the program of a step, which may cut units (MSP).

Counted action by action are saved tensors from forward to backward, the working set of the running
unit or shard, and messages between stages. A rank holds the saved tensors of the units and shards
that it runs, whether of its own stages or as a borrower. All of them share the slots of the rank,
and the shards of each stage have tier extents of their own. More tensors are live while a shard
runs than while a unit as long runs (:mod:`sppo.cost.live_sets.shard_live_sets`). Sequences of a
program with MSP run one after another, so only one is held at once.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sppo.activations.placement import ActivationPlacement, Counts
from sppo.activations.subsequence_placement import SubsequencePlacement
from sppo.cost.candidate import Candidate
from sppo.cost.communicators import communicators_bytes
from sppo.cost.live_sets.shard_live_sets import BORROWED_LAYERS, ShardSizes
from sppo.cost.memory.copy_room import block_slots, stage_blocks
from sppo.cost.memory.messages import exchanged_bytes, sent_bytes, tokens_held
from sppo.cost.memory.process_growth import code_bytes
from sppo.cost.memory.stage_memory import StageMemory
from sppo.cost.memory.state_memory import collective_bytes, of_each_rank
from sppo.cost.memory.unit_working_sets import (
    block_layout,
    computing_bytes,
    joined_bytes,
    loss_bytes,
    running_bytes,
)
from sppo.cost.memory.walk import Walk, bytes_at_peak, during
from sppo.cost.stages.saved_bytes import placed_bytes
from sppo.schedule.costs import Table
from sppo.schedule.msp_groups import msp_ranges
from sppo.schedule.orders.names import DEFERRING_WEIGHTS
from sppo.schedule.schedule import Schedule


def holds_messages(candidate: Candidate) -> bool:
    """Return whether the memory of a candidate is counted with the messages that ranks hold.

    It is on a CPU, where messages are held until they are waited for. It is not with one stage,
    which has no messages, for packed sequences, and if weight halves are deferred.
    """
    on_cpu = candidate.workload.hardware.device.kind == "cpu"
    is_left_out = candidate.packed or candidate.schedule in DEFERRING_WEIGHTS
    return on_cpu and candidate.num_stages > 1 and not is_left_out


def with_program(
    memory: tuple[StageMemory, ...],
    *,
    candidate: Candidate,
    placement: ActivationPlacement,
    schedule: Schedule,
) -> tuple[StageMemory, ...]:
    """Return the memory of each rank under the program of a step, which may run shards.

    Args:
        memory: Memory of each rank if it ran all units whole, with the messages of the running one.
        candidate: Candidate to price.
        placement: Placement by the activation policy.
        schedule: Schedule with the programs of a step, with messages if :func:`holds_messages`;
            otherwise those of the running unit count, as if it ran whole.
    """
    if not (schedule.msp_groups or holds_messages(candidate)):
        return memory
    program = _Program(candidate, placement, schedule)
    at_peak = of_each_rank(program.at_peak())
    found = tuple(
        replace(held, device=replace(held.device, **own))
        for held, own in zip(memory, at_peak, strict=True)
    )
    return program.with_shards(found) if schedule.msp_groups else found


class _Program:
    """Forwards and backwards of all ranks in program order. Arrays are [ranks, actions].

    Args:
        candidate: Candidate to price.
        placement: Placement by the activation policy.
        schedule: Schedule with the programs of a step, with or without messages.
    """

    def __init__(
        self, candidate: Candidate, placement: ActivationPlacement, schedule: Schedule
    ) -> None:
        self._candidate, self._placement, self._schedule = candidate, placement, schedule
        self._walk = walk = Walk(schedule)
        self._is_cut = schedule.widths[walk.actions] > 1
        self._is_own = walk.stages % schedule.num_ranks == np.arange(schedule.num_ranks)[:, None]
        self._is_last = walk.stages == schedule.num_stages - 1
        self._unit_tokens = np.array(candidate.lengths)[walk.units]
        shares = schedule.shares[walk.actions]
        self._tokens = np.rint(self._unit_tokens * shares).astype(np.int64)
        self._saved = placed_bytes(placement, "retained", candidate=candidate)
        whole = candidate.workload.hidden_row_bytes
        self._row_bytes = whole / candidate.workload.sequence_parallel_degree

    def at_peak(self) -> dict[str, Counts]:
        """Return the bytes at the peak of each rank by bucket, [ranks] each.

        If messages count, gradients of the loss are held from the forward, which forms them at its
        end, to the backward.
        """
        walk, candidate = self._walk, self._candidate
        has_messages = holds_messages(candidate)
        losses = self._unit_tokens * self._row_bytes * (self._is_own & self._is_last) * has_messages
        formed, activations = losses * walk.is_forward, walk.held(self._saved)
        sent = self._messages_held() if has_messages else self._messages_as_if_whole()
        found = bytes_at_peak(
            replace(candidate, sequences=1) if self._schedule.msp_groups else candidate,
            walk,
            activations=activations + during(formed - losses * walk.is_backward),
            computing=self._working_bytes - formed,
            sent=sent * (walk.is_forward | walk.is_backward),
        )
        found["communication_bytes"] += collective_bytes(candidate)
        if has_messages:
            saved = np.rint(activations.max(axis=1)).astype(np.int64)
            found["loss_gradient_bytes"] = found["activations_bytes"] - saved
            found["activations_bytes"] = saved
        return found

    def _messages_as_if_whole(self) -> Table:
        """Return the bytes of messages and exchanges of the units of actions if they ran whole."""
        ranks = np.arange(self._schedule.num_ranks)[:, None]
        sent = sent_bytes(self._candidate)
        of_ranks = sent.reshape(2, -1, len(ranks), sent.shape[-1]).max(axis=1)
        found: Table = of_ranks[self._walk.is_backward.astype(np.int64), ranks, self._walk.units]
        return found

    def _messages_held(self) -> Table:
        """Return the bytes of all messages held, and of exchanges, during each action.

        In the backward of a layer that is not the stage's last, the gradient comes from the layer
        above instead of the stage's input, and the saved tensors of the layer above are free. A
        shard's input stays until its backward ends.
        """
        walk, lengths = self._walk, np.array(self._candidate.lengths, dtype=np.float64)
        held, freed = np.zeros((2, *walk.actions.shape))
        for rank in range(self._schedule.num_ranks):
            own = [*tokens_held(self._schedule, rank=rank)]
            held[rank, : len(own)], freed[rank, : len(own)] = np.array(own).T
        layers = np.maximum(1, self._candidate.backward_layers)[walk.stages]
        saved = np.abs(walk.begins) * walk.of_actions(self._saved)
        above = self._tokens - freed * ~self._is_cut - saved / layers / self._row_bytes
        held += self._handed_out_tokens
        held += np.maximum(0.0, above) * (walk.is_backward & (layers > 1))
        found: Table = exchanged_bytes(self._candidate, lengths)[walk.units]
        return found + held * self._row_bytes

    def with_shards(self, memory: tuple[StageMemory, ...]) -> tuple[StageMemory, ...]:
        """Return the memory of each rank with what shards take beside the peak."""
        candidate, walk = self._candidate, self._walk
        (blocks, in_tier), workload = self._blocks(), candidate.workload
        ranges, found = msp_ranges(self._schedule.msp_groups), []
        for rank, (held, block_bytes) in enumerate(zip(memory, blocks.tolist(), strict=True)):
            stages = {*walk.stages[rank, walk.is_forward[rank]].tolist()}
            most_layers = max(stages, key=candidate.backward_layers.__getitem__)
            layout = block_layout(candidate, stage=most_layers)
            slots, waiting, staging = block_slots(candidate, layout)
            tokens = {*self._tokens[rank, walk.is_forward[rank]].tolist()}
            code, whole_code = (
                code_bytes(workload, lengths=lengths) for lengths in (tokens, candidate.lengths)
            )
            device = replace(
                held.device,
                copies_bytes=slots * block_bytes,
                working_bytes=held.device.working_bytes + waiting * block_bytes,
                growth_bytes=held.device.growth_bytes + code - whole_code,
                communicators_bytes=communicators_bytes(candidate, position=rank, ranges=ranges),
            )
            in_tiers = {
                "tier_activations_bytes": int(in_tier[rank]),
                "staging_bytes": staging * block_bytes,
            }
            found.append(replace(held, device=device, **in_tiers))
        return tuple(found)

    def _blocks(self) -> tuple[Counts, Counts]:
        """Return the bytes of the largest block of each rank, and its bytes in the tier, [ranks].

        Whole units and shards of a stage have extents of their own.
        """
        walk, ranks, stages = self._walk, self._schedule.num_ranks, self._schedule.num_stages
        largest = np.zeros(ranks, dtype=np.int64)
        extents = np.zeros((ranks, stages, 2, self._schedule.num_sequences), dtype=np.int64)
        layouts = [block_layout(self._candidate, stage=stage) for stage in range(stages)]
        whole = [
            stage_blocks(self._placement, layout, stage=stage)
            for stage, layout in enumerate(layouts)
        ]
        for rank, at in np.argwhere(walk.is_forward).tolist():
            stage, is_cut = walk.stages[rank, at], int(self._is_cut[rank, at])
            sizes = whole[stage][walk.units[rank, at]]
            if is_cut:
                placed = self._placed(rank, at)
                (sizes,) = layouts[stage].blocks(
                    np.array([placed.offloaded]), attention_saved=np.array([placed.attention_saved])
                )
            largest[rank] = max(largest[rank], sizes.max(initial=0))
            extents[rank, stage, is_cut, walk.sequences[rank, at]] += sizes.sum()
        return largest, extents.max(axis=3).sum(axis=(1, 2))

    @property
    def _working_bytes(self) -> Table:
        """Bytes of the working set of each unit or shard.

        The gradient of the stage's output is among the messages.
        """
        candidate, walk = self._candidate, self._walk
        working = walk.running(computing_bytes(candidate, self._placement, beside_messages=True))
        is_at_loss = self._is_own & self._is_last & walk.is_forward
        for rank, at in np.argwhere(self._is_cut).tolist():
            working[rank, at] = self._shard_set(rank, at)[int(walk.is_backward[rank, at])]
            if is_at_loss[rank, at]:
                # The owner's shard of the gathered output is still alive.
                loss = loss_bytes(candidate.workload, tokens=int(self._unit_tokens[rank, at]))
                output = round(self._tokens[rank, at] * self._row_bytes)
                working[rank, at] = max(working[rank, at], loss + output)
        layouts = (block_layout(candidate, stage=stage) for stage in range(candidate.num_stages))
        joined = [
            joined_bytes(self._placement, layout, stage=stage).max()
            for stage, layout in enumerate(layouts)
        ]
        working += np.array(joined)[walk.stages] * walk.is_backward
        return working

    def _placed(self, rank: int, at: int) -> SubsequencePlacement:
        """Return the retained, offloaded and recomputed rows of a shard."""
        unit = self._walk.stages[rank, at], self._walk.units[rank, at]
        retained, offloaded, recomputed = (
            (int(x), int(a), int(rest)) for x, a, rest in (table[unit] for table in self._placement)
        )
        whole, own = SubsequencePlacement(retained, offloaded, recomputed), self._tokens[rank, at]
        return whole.sharded((int(own), whole.tokens - int(own)))[0]

    def _shard_set(self, rank: int, at: int) -> tuple[int, int]:
        """Return the bytes of the working sets of a shard's forward and backward."""
        candidate, placed = self._candidate, self._placed(rank, at)
        action, part = int(self._walk.actions[rank, at]), int(self._walk.units[rank, at])
        stage = int(self._walk.stages[rank, at])
        layers = int(candidate.backward_layers[stage])
        lengths = self._schedule.msp_groups[int(self._schedule.slots[action])].lengths
        prefix, unit = candidate.prefixes[part], candidate.lengths[part]
        borrowed = (
            0 if self._is_own[rank, at] else min(BORROWED_LAYERS, len(candidate.stages[stage]))
        )
        return running_bytes(
            candidate,
            tokens=placed.tokens,
            prefix=prefix + sum(lengths[: int(self._schedule.shards[action])]),
            recomputed=frozenset(index for index, rows in enumerate(placed.recomputed) if rows),
            retained=frozenset(
                index for index, rows in enumerate(placed.retained) if rows == placed.tokens
            ),
            stage=stage,
            layers=min(layers, candidate.input_every),
            shard=ShardSizes(unit, prefix + unit, borrowed),
        )

    @property
    def _handed_out_tokens(self) -> Counts:
        """Further tokens of a shard's input that the owner of the stage hands out.

        The owner's own part of the first stage's input is a view of that of the whole unit. A
        borrower receives its part of the gradient of the loss; the owner's is a saved tensor.
        """
        walk = self._walk
        views = self._is_cut & walk.is_forward & self._is_own & (walk.stages == 0)
        parts = self._is_cut & walk.is_backward & ~self._is_own & self._is_last
        further: Counts = (self._unit_tokens - self._tokens) * views + self._tokens * parts
        return further
