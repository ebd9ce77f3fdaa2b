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
from functools import cached_property

import numpy as np

from sppo.activations.activation_layout import BlockLayout, Flags
from sppo.activations.placement import ActivationPlacement, Counts
from sppo.activations.subsequence_placement import SubsequencePlacement
from sppo.cost.candidate import Candidate
from sppo.cost.communicators import communicators_bytes
from sppo.cost.live_sets.shard_live_sets import BORROWED_LAYERS, ShardSizes
from sppo.cost.memory.copy_room import (
    reserved_slots,
    slots_on_device,
    stage_blocks,
    staging_slots,
)
from sppo.cost.memory.joined_tensors import block_layout, joined_bytes
from sppo.cost.memory.messages_held import tokens_held
from sppo.cost.memory.process_growth import code_bytes
from sppo.cost.memory.stage_memory import StageMemory
from sppo.cost.memory.state_memory import collective_bytes
from sppo.cost.memory.unit_messages import exchanged_bytes, sent_bytes
from sppo.cost.memory.unit_working_sets import computing_bytes, loss_bytes, running_bytes
from sppo.cost.memory.walk import kv_held
from sppo.cost.stage_cost import placed_bytes
from sppo.schedule.actions import Op
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


def with_messages_held(
    memory: tuple[StageMemory, ...],
    *,
    candidate: Candidate,
    placement: ActivationPlacement,
    schedule: Schedule,
) -> tuple[StageMemory, ...]:
    """Return the memory of each rank with the working sets and messages of an executed program.

    If no unit is cut, K and V count as at their own peaks: working sets and messages are counted
    without them, and may be largest at another moment.

    Args:
        memory: Memory of each rank, with the messages of the running unit.
        candidate: Candidate to price, for which :func:`holds_messages` is true.
        placement: Placement by the activation policy.
        schedule: Schedule with the programs of a step, with messages.
    """
    saved, working, messages = _Program(candidate, placement, schedule).peaks_with_messages()
    kv, gradients = (np.rint(table.max(axis=1)) for table in kv_held(candidate))
    sent = collective_bytes(candidate) + messages
    found = []
    for rank, held in enumerate(memory):
        device = held.device
        if not schedule.msp_groups:
            device = replace(
                device, kv_bytes=int(kv[rank]), kv_gradients_bytes=int(gradients[rank])
            )
        device = replace(
            device,
            loss_gradient_bytes=int(saved[rank]) - device.activations_bytes,
            working_bytes=int(working[rank]),
            communication_bytes=int(sent[rank]),
        )
        found.append(replace(held, device=device))
    return tuple(found)


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
        schedule: Schedule with the programs of a step, without messages.
    """
    if not schedule.msp_groups:
        return memory
    program = _Program(candidate, placement, schedule)
    saved, working, messages = program.peaks_as_if_whole()
    blocks, in_tier = program.blocks()
    kv, gradients = kv_held(replace(candidate, sequences=1))
    communication = collective_bytes(candidate) + messages
    ranges = msp_ranges(schedule.msp_groups)
    whole_code = code_bytes(candidate.workload, lengths=candidate.lengths)
    found = []
    for rank, held in enumerate(memory):
        lengths, layout = program.lengths(rank), program.largest_layout(rank)
        reserved, block_bytes = reserved_slots(candidate, layout), int(blocks[rank])
        leaving = slots_on_device(candidate, layout) - reserved
        code = code_bytes(candidate.workload, lengths=lengths) - whole_code
        device = replace(
            held.device,
            kv_bytes=round(kv[rank].max()),
            kv_gradients_bytes=round(gradients[rank].max()),
            activations_bytes=int(saved[rank]),
            copies_bytes=reserved * block_bytes,
            working_bytes=int(working[rank]) + leaving * block_bytes,
            communication_bytes=int(communication[rank]),
            growth_bytes=held.device.growth_bytes + code,
            communicators_bytes=communicators_bytes(candidate, position=rank, ranges=ranges),
        )
        in_tiers = {
            "tier_activations_bytes": int(in_tier[rank]),
            "staging_bytes": staging_slots(candidate, layout) * block_bytes,
        }
        found.append(replace(held, device=device, **in_tiers))
    return tuple(found)


class _Program:
    """Forwards and backwards of all ranks in program order. Arrays are [actions].

    Args:
        candidate: Candidate to price.
        placement: Placement by the activation policy.
        schedule: Schedule with the programs of a step, with or without messages.
    """

    def __init__(
        self, candidate: Candidate, placement: ActivationPlacement, schedule: Schedule
    ) -> None:
        self._candidate, self._placement, self._schedule = candidate, placement, schedule
        found = schedule.of(Op.F, Op.B)
        self._ranks, self._stages = schedule.ranks[found], schedule.stages[found]
        self._parts, self._sequences = schedule.before[found], schedule.sequences[found]
        self._slots, self._shards = schedule.slots[found], schedule.shards[found]
        self._is_forward, self._is_cut = schedule.codes[found] == Op.F, schedule.widths[found] > 1
        self._is_own = self._stages % schedule.num_ranks == self._ranks
        self._units = np.array(candidate.lengths)[self._parts]
        shares = schedule.shares[found]
        self._tokens = np.rint(self._units * shares).astype(np.int64)
        retained = placed_bytes(placement, "retained", candidate=candidate)
        self._saved = shares * retained[self._stages, self._parts]
        workload = candidate.workload
        whole = workload.model.hidden_size * workload.element_bytes
        self._row_bytes = whole / workload.sequence_parallel_degree

    def lengths(self, rank: int) -> set[int]:
        """Return the distinct tokens of the units and shards that a rank runs."""
        return {*self._tokens[self._ranks == rank].tolist()}

    def peaks_as_if_whole(self) -> tuple[Counts, Counts, Counts]:
        """Return the peaks of :meth:`_peaks` with the messages of units as if they ran whole."""
        ranks = self._schedule.num_ranks
        sent = sent_bytes(self._candidate)
        of_ranks = sent.reshape(2, -1, ranks, sent.shape[-1]).max(axis=1)
        messages = of_ranks[(~self._is_forward).astype(np.int64), self._ranks, self._parts]
        return self._peaks(messages, losses=np.zeros(len(messages)))

    def peaks_with_messages(self) -> tuple[Counts, Counts, Counts]:
        """Return the peaks of :meth:`_peaks` with all messages held, of a program that has them.

        In the backward of a layer that is not the stage's last, the gradient comes from the layer
        above instead of the stage's input, and the saved tensors of the layer above are free. A
        shard's input stays until its backward ends.
        """
        ranks = range(self._schedule.num_ranks)
        pairs = [pair for rank in ranks for pair in tokens_held(self._schedule, rank=rank)]
        held, freed = np.array(pairs, dtype=np.float64).T
        layers = np.array([len(stage) for stage in self._candidate.stages])[self._stages]
        above = self._tokens - freed * ~self._is_cut - self._saved / layers / self._row_bytes
        held += self._handed_out_tokens()
        held += np.maximum(0.0, above) * (~self._is_forward & (layers > 1))
        exchanged = exchanged_bytes(self._candidate, np.array(self._candidate.lengths, np.float64))
        losses = self._units * self._row_bytes * self._is_at_loss
        return self._peaks(exchanged[self._parts] + held * self._row_bytes, losses=losses)

    def _peaks(self, messages: Table, *, losses: Table) -> tuple[Counts, Counts, Counts]:
        """Return the peak of saved tensors, and how much working sets and messages raise it.

        Working sets are often largest when little is saved yet, so they count by as much as they
        raise the peak of saved tensors, and messages by as much as they raise the peak of both.

        Args:
            messages: Bytes of messages and exchanges beside each action.
            losses: Bytes of the gradient of the loss, which a forward forms at its end.

        Returns:
            Bytes, [ranks] each.
        """
        saved = self._saved + losses
        after = np.cumsum(np.where(self._is_forward, saved, -saved))
        running = np.where(self._is_forward, after - losses, after + saved) + self._working_bytes
        starts = np.searchsorted(self._ranks, np.arange(self._schedule.num_ranks))
        held, computing, together = (
            np.maximum.reduceat(table, starts) for table in (after, running, running + messages)
        )
        raised = (held, computing - held, together - computing)
        most, working, communication = (np.rint(table).astype(np.int64) for table in raised)
        return most, working, communication

    def blocks(self) -> tuple[Counts, Counts]:
        """Return the bytes of the largest block of each rank, and its bytes in the tier, [ranks].

        Whole units and shards of a stage have extents of their own.
        """
        ranks, stages = self._schedule.num_ranks, self._schedule.num_stages
        largest = np.zeros(ranks, dtype=np.int64)
        extents = np.zeros((ranks, stages, 2, self._schedule.num_sequences), dtype=np.int64)
        layouts = [block_layout(self._candidate, stage=stage) for stage in range(stages)]
        whole = [
            stage_blocks(self._placement, layout, stage=stage)
            for stage, layout in enumerate(layouts)
        ]
        for at in np.flatnonzero(self._is_forward).tolist():
            rank, stage, is_cut = self._ranks[at], self._stages[at], int(self._is_cut[at])
            sizes = whole[stage][self._parts[at]]
            if is_cut:
                placed = self._placed(at)
                (sizes,) = layouts[stage].blocks(
                    np.array([placed.offloaded]), attention_saved=np.array([placed.attention_saved])
                )
            largest[rank] = max(largest[rank], sizes.max())
            extents[rank, stage, is_cut, self._sequences[at]] += sizes.sum()
        return largest, extents.max(axis=3).sum(axis=(1, 2))

    def largest_layout(self, rank: int) -> BlockLayout:
        """Return the layout of the stage with most layers of which a rank runs units or shards."""
        layouts = (
            block_layout(self._candidate, stage=stage)
            for stage in np.unique(self._stages[self._ranks == rank]).tolist()
        )
        return max(layouts, key=lambda layout: len(layout.layers))

    @property
    def _is_at_loss(self) -> Flags:
        """Whether each action runs on the owner of the last stage."""
        at_loss: Flags = self._is_own & (self._stages == self._schedule.num_stages - 1)
        return at_loss

    @cached_property
    def _working_bytes(self) -> Table:
        """Bytes of the working set of each unit or shard.

        The gradient of the stage's output is among the messages.
        """
        candidate, backward = self._candidate, ~self._is_forward
        sets = computing_bytes(candidate, self._placement, beside_messages=True)
        working: Table = sets[backward.astype(np.int64), self._stages, self._parts]
        for at in np.flatnonzero(self._is_cut).tolist():
            working[at] = self._shard_set(at)[int(backward[at])]
        # The owner's shard of the gathered output is still alive.
        for at in np.flatnonzero(self._is_cut & self._is_at_loss & self._is_forward).tolist():
            loss = loss_bytes(candidate.workload, tokens=int(self._units[at]))
            working[at] = max(working[at], loss + round(self._tokens[at] * self._row_bytes))
        joined = np.array(
            [
                joined_bytes(
                    self._placement, block_layout(candidate, stage=stage), stage=stage
                ).max()
                for stage in range(candidate.num_stages)
            ]
        )
        working += joined[self._stages] * backward
        return working

    def _placed(self, at: int) -> SubsequencePlacement:
        """Return the retained, offloaded and recomputed rows of a shard."""
        retained, offloaded, recomputed = (
            (int(x), int(a), int(rest))
            for x, a, rest in (
                table[self._stages[at], self._parts[at]] for table in self._placement
            )
        )
        own, whole = int(self._tokens[at]), SubsequencePlacement(retained, offloaded, recomputed)
        return whole.sharded((own, whole.tokens - own))[0]

    def _shard_set(self, at: int) -> tuple[int, int]:
        """Return the bytes of the working sets of a shard's forward and backward."""
        candidate, stage, placed = self._candidate, int(self._stages[at]), self._placed(at)
        part, tokens, layers = int(self._parts[at]), int(self._tokens[at]), candidate.stages[stage]
        lengths = self._schedule.msp_groups[int(self._slots[at])].lengths
        prefix, unit = candidate.prefixes[part], candidate.lengths[part]
        borrowed = 0 if self._is_own[at] else min(BORROWED_LAYERS, len(layers))
        return running_bytes(
            candidate,
            tokens=tokens,
            prefix=prefix + sum(lengths[: int(self._shards[at])]),
            recomputed=frozenset(index for index, rows in enumerate(placed.recomputed) if rows),
            retained=frozenset(
                index for index, rows in enumerate(placed.retained) if rows == tokens
            ),
            layers=min(len(layers), candidate.input_every),
            shard=ShardSizes(unit, prefix + unit, borrowed),
        )

    def _handed_out_tokens(self) -> Counts:
        """Return the further tokens of a shard's input that the owner of the stage hands out.

        The owner's own part of the first stage's input is a view of that of the whole unit. A
        borrower receives its part of the gradient of the loss; the owner's is a saved tensor.
        """
        is_last = self._stages == self._schedule.num_stages - 1
        views = self._is_cut & self._is_forward & self._is_own & (self._stages == 0)
        parts = self._is_cut & ~self._is_forward & ~self._is_own & is_last
        further: Counts = (self._units - self._tokens) * views + self._tokens * parts
        return further
