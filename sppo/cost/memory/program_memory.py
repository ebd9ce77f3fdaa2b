"""Memory of the ranks of a pipeline under the program of a step, which may cut units (MSP).

Counted action by action are saved tensors from forward to backward, the working set of the running
unit or shard, and messages between stages. A rank holds the saved tensors of the units and shards
that it runs, whether of its own stages or as a borrower. All of them share the slots of the rank,
and the shards of each stage have tier extents of their own. More tensors are live while a shard
runs than while a unit as long runs (:mod:`sppo.cost.live_sets.shard_live_sets`). Sequences of a
program with MSP run one after another, so fewer are held at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from functools import cached_property

import numpy as np

from sppo.activations.placement import ActivationPlacement
from sppo.activations.subsequence_placement import SubsequencePlacement
from sppo.cost.candidate import Candidate
from sppo.cost.communicators import communicators_bytes
from sppo.cost.kv import kv_tokens
from sppo.cost.live_sets.shard_live_sets import BORROWED_LAYERS, ShardSizes
from sppo.cost.memory.copy_room import (
    reserved_slots,
    slots_on_device,
    stage_blocks,
    staging_slots,
)
from sppo.cost.memory.joined_tensors import block_layout, joined_bytes
from sppo.cost.memory.messages_held import MessagesHeld
from sppo.cost.memory.process_growth import code_bytes
from sppo.cost.memory.stage_memory import StageMemory
from sppo.cost.memory.state_memory import collective_bytes
from sppo.cost.memory.unit_messages import exchanged_bytes, sent_bytes
from sppo.cost.memory.unit_working_sets import loss_bytes, running_bytes, whole_unit_bytes
from sppo.cost.memory.walk import kv_held
from sppo.cost.stage_cost import placed_bytes
from sppo.schedule.actions import Action, ActionKind, sequences_in_flight
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
    collective, (kv, gradients) = collective_bytes(candidate).tolist(), kv_held(candidate)
    found = []
    for rank, held in enumerate(memory):
        program = RankProgram(candidate, placement, schedule, rank)
        saved, working, messages = program.peaks(program.messages_held(), counts_loss=True)
        device = held.device
        if not schedule.msp_groups:
            most_kv, most_gradients = round(kv[rank].max()), round(gradients[rank].max())
            device = replace(device, kv_bytes=most_kv, kv_gradients_bytes=most_gradients)
        device = replace(
            device,
            loss_gradient_bytes=saved - device.activations_bytes,
            working_bytes=working,
            communication_bytes=collective[rank] + messages,
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
    workload, longest = candidate.workload, candidate.longest_sequence
    of_kv, of_gradients = (longest * of_token for of_token in kv_tokens(candidate))
    collective, ranges = collective_bytes(candidate).tolist(), msp_ranges(schedule.msp_groups)
    whole_code = code_bytes(workload, lengths=candidate.lengths)
    found = []
    for rank, held in enumerate(memory):
        program = RankProgram(candidate, placement, schedule, rank)
        saved, working, messages = program.peaks(program.sent(), counts_loss=False)
        block_bytes, layout_of, in_tier = program.blocks()
        layout = block_layout(candidate, stage=layout_of)
        reserved = reserved_slots(candidate, layout)
        leaving = slots_on_device(candidate, layout) - reserved
        code = code_bytes(workload, lengths={*map(program.tokens, program.forwards)}) - whole_code
        own = program.own_stages
        device = replace(
            held.device,
            kv_bytes=round(of_kv[own].sum() * program.sequences),
            kv_gradients_bytes=round(of_gradients[own].max()),
            activations_bytes=saved,
            copies_bytes=reserved * block_bytes,
            working_bytes=working + leaving * block_bytes,
            communication_bytes=collective[rank] + messages,
            growth_bytes=held.device.growth_bytes + code,
            communicators_bytes=communicators_bytes(candidate, position=rank, ranges=ranges),
        )
        found.append(
            replace(
                held,
                device=device,
                tier_activations_bytes=in_tier,
                staging_bytes=staging_slots(candidate, layout) * block_bytes,
            )
        )
    return tuple(found)


class RankProgram:
    """Forwards and backwards of one pipeline rank in program order, and the bytes of each.

    Tables of bytes are [actions].

    Args:
        candidate: Candidate to price.
        placement: Placement by the activation policy.
        schedule: Schedule with the programs of a step, with or without messages.
        rank: Pipeline rank.
    """

    def __init__(
        self,
        candidate: Candidate,
        placement: ActivationPlacement,
        schedule: Schedule,
        rank: int,
    ) -> None:
        self._candidate, self._placement = candidate, placement
        self._schedule, self._rank = schedule, rank
        self.own_stages = candidate.stages_of_rank(rank)
        self._actions = schedule.programs[rank]
        computes = [a for a in self._actions if a.kind in (ActionKind.F, ActionKind.B)]
        self._computes = computes
        self.forwards = [action for action in computes if action.kind is ActionKind.F]
        self._retained = placed_bytes(placement, "retained", candidate=candidate)
        workload = candidate.workload
        whole = workload.model.hidden_size * workload.element_bytes
        self._row_bytes = whole / workload.sequence_parallel_degree

    @property
    def sequences(self) -> int:
        """Most sequences of which the rank holds units of its own stages at once."""
        return sequences_in_flight(a for a in self._computes if a.stage in self.own_stages)

    def tokens(self, action: Action) -> int:
        """Return the tokens of the unit or shard of an action."""
        if action.num_shards == 1:
            return self._unit_tokens(action)
        return self._shards(action)[action.shard]

    def peaks(self, messages: Table, *, counts_loss: bool) -> tuple[int, int, int]:
        """Return the peak of saved tensors, and how much working sets and messages raise it.

        Working sets are often largest when little is saved yet, so they count by as much as they
        raise the peak of saved tensors, and messages by as much as they raise the peak of both.

        Args:
            messages: Bytes of messages and exchanges beside each action.
            counts_loss: Whether gradients of the loss, which a forward forms at its end, are held.
        """
        is_forward = np.array([action.kind is ActionKind.F for action in self._computes])
        saved = np.array([self._saved_bytes(action) for action in self._computes])
        working = np.array([self._working_bytes(action) for action in self._computes])
        loss = np.zeros(len(saved))
        if counts_loss:
            loss += [self._loss_gradient_bytes(action) for action in self._computes]
        after = np.cumsum(np.where(is_forward, 1, -1) * (saved + loss))
        running = np.where(is_forward, after - loss, after + saved + loss) + working
        held, computing, together = (
            float(table.max(initial=0.0)) for table in (after, running, running + messages)
        )
        return round(held), round(computing - held), round(together - computing)

    def sent(self) -> Table:
        """Return the bytes of messages and exchanges of the unit that runs, as if it ran whole."""
        sent, own = sent_bytes(self._candidate), list(self.own_stages)
        forward, backward = sent[:, own].max(axis=1)
        return np.array(
            [
                (forward if action.kind is ActionKind.F else backward)[action.unit[1]]
                for action in self._computes
            ]
        )

    def messages_held(self) -> Table:
        """Return the bytes of all messages that are held, and of exchanges, from a whole program.

        In the backward of a layer that is not the stage's last, the gradient comes from the layer
        above instead of the stage's input, and the saved tensors of the layer above are free. A
        shard's input stays until its backward ends.
        """
        messages = MessagesHeld(self._schedule, rank=self._rank)
        lengths = np.array(self._candidate.lengths, dtype=np.float64)
        exchanged = exchanged_bytes(self._candidate, lengths).tolist()
        found = []
        for action in self._actions:
            if action.kind is ActionKind.SEND:
                messages.send(action)
            elif action.kind is ActionKind.RECV:
                messages.receive(action)
            elif action.kind in (ActionKind.F, ActionKind.B):
                messages.begin(action)
                held: float = messages.tokens + self._handed_out_tokens(action)
                layers = len(self._candidate.stages[action.stage])
                if action.kind is ActionKind.B and layers > 1:
                    freed = messages.freed_tokens if action.num_shards == 1 else 0
                    saved = self._saved_bytes(action) / layers / self._row_bytes
                    held += max(0.0, self.tokens(action) - freed - saved)
                found.append(exchanged[action.unit[1]] + held * self._row_bytes)
                messages.end(action, tokens=self.tokens(action))
        return np.array(found)

    def blocks(self) -> tuple[int, int, int]:
        """Return the bytes of the largest block, the stage with most layers, and bytes in the tier.

        Whole units of a stage take extents for as many sequences as are in flight, shards for one.
        """
        candidate, largest = self._candidate, 0
        layouts = {a.stage: block_layout(candidate, stage=a.stage) for a in self.forwards}
        layouts |= {stage: block_layout(candidate, stage=stage) for stage in self.own_stages}
        whole = {
            stage: stage_blocks(self._placement, layouts[stage], stage=stage).tolist()
            for stage in self.own_stages
        }
        by_sequence: dict[tuple[int, bool], Counter[int]] = defaultdict(Counter)
        for action in self.forwards:
            is_cut, (sequence, unit) = action.num_shards > 1, action.unit
            if is_cut:
                placed = self._placed(action)
                (sizes,) = (
                    layouts[action.stage]
                    .blocks(
                        np.array([placed.offloaded]),
                        attention_saved=np.array([placed.attention_saved]),
                    )
                    .tolist()
                )
            else:
                sizes = whole[action.stage][unit]
            largest = max(largest, *sizes)
            by_sequence[action.stage, is_cut][sequence] += sum(sizes)
        in_tier = sum(
            max(of_sequences.values()) * (1 if is_cut else self.sequences)
            for (_, is_cut), of_sequences in by_sequence.items()
        )
        return largest, max(layouts, key=lambda stage: len(layouts[stage].layers)), in_tier

    def _unit_tokens(self, action: Action) -> int:
        """Return the tokens of the whole unit of an action."""
        return self._candidate.lengths[action.unit[1]]

    def _shards(self, action: Action) -> tuple[int, ...]:
        """Return the tokens of each shard of the unit of an action."""
        slot = self._schedule.slot(action.stage, action.unit)
        return tuple(self._schedule.msp_groups[slot].lengths)

    def _is_at_the_loss(self, action: Action) -> bool:
        """Return whether an action runs on the owner of the last stage."""
        return action.stage in self.own_stages and self._candidate.is_last_stage(action.stage)

    def _placed(self, action: Action) -> SubsequencePlacement:
        """Return the retained, offloaded and recomputed rows of a shard."""
        tables = self._placement.retained, self._placement.offloaded, self._placement.recomputed
        retained, offloaded, recomputed = (
            (int(x), int(a), int(rest))
            for x, a, rest in (table[action.stage, action.unit[1]].tolist() for table in tables)
        )
        own, whole = self.tokens(action), SubsequencePlacement(retained, offloaded, recomputed)
        return whole.sharded((own, whole.tokens - own))[0]

    def _saved_bytes(self, action: Action) -> float:
        """Return the bytes of saved tensors that a forward leaves and a backward frees."""
        share = self.tokens(action) / self._unit_tokens(action)
        return share * float(self._retained[action.stage, action.unit[1]])

    def _working_bytes(self, action: Action) -> float:
        """Return the bytes of the working set of a unit or a shard.

        The gradient of the stage's output is among the messages.
        """
        stage, is_backward = action.stage, action.kind is ActionKind.B
        if action.num_shards == 1:
            working = float(self._whole_sets[stage][is_backward][action.unit[1]])
        else:
            working = float(self._shard_set(action)[is_backward])
        if is_backward:
            return working + self._joined[stage]
        if action.num_shards > 1 and self._is_at_the_loss(action):
            loss = loss_bytes(self._candidate.workload, tokens=self._unit_tokens(action))
            # The owner's shard of the gathered output is still alive.
            return max(working, loss + round(self.tokens(action) * self._row_bytes))
        return working

    @cached_property
    def _whole_sets(self) -> dict[int, tuple[Table, Table]]:
        """Working sets of the forwards and backwards of whole units, [N] each, of own stages."""
        return {
            stage: whole_unit_bytes(
                self._candidate, self._placement, stage=stage, layers=self._layers_counted(stage)
            )
            for stage in self.own_stages
        }

    @cached_property
    def _joined(self) -> dict[int, int]:
        """Most bytes that a backward of each stage joins."""
        return {
            stage: int(
                joined_bytes(
                    self._placement, block_layout(self._candidate, stage=stage), stage=stage
                ).max()
            )
            for stage in {action.stage for action in self._computes}
        }

    def _shard_set(self, action: Action) -> tuple[int, int]:
        """Return the bytes of the working sets of a shard's forward and backward."""
        candidate, stage, placed = self._candidate, action.stage, self._placed(action)
        lengths, unit = self._shards(action), action.unit[1]
        prefix, tokens = sum(candidate.lengths[:unit]), lengths[action.shard]
        borrowed = min(BORROWED_LAYERS, len(candidate.stages[stage]))
        return running_bytes(
            candidate,
            tokens=tokens,
            prefix=prefix + sum(lengths[: action.shard]),
            recomputed=frozenset(index for index, rows in enumerate(placed.recomputed) if rows),
            retained=frozenset(
                index for index, rows in enumerate(placed.retained) if rows == tokens
            ),
            layers=self._layers_counted(stage),
            shard=ShardSizes(
                candidate.lengths[unit],
                prefix + candidate.lengths[unit],
                0 if stage in self.own_stages else borrowed,
            ),
        )

    def _layers_counted(self, stage: int) -> int:
        return min(len(self._candidate.stages[stage]), self._candidate.input_every)

    def _handed_out_tokens(self, action: Action) -> int:
        """Return the further tokens of a shard's input that the owner of the stage hands out.

        The owner's own part of the first stage's input is a view of that of the whole unit. A
        borrower receives its part of the gradient of the loss; the owner's is a saved tensor.
        """
        if action.num_shards == 1:
            return 0
        is_owner, tokens = action.stage in self.own_stages, self.tokens(action)
        if action.kind is ActionKind.F and action.stage == 0 and is_owner:
            return self._unit_tokens(action) - tokens
        last = self._candidate.is_last_stage(action.stage)
        return tokens if action.kind is ActionKind.B and last and not is_owner else 0

    def _loss_gradient_bytes(self, action: Action) -> float:
        """Return the bytes of the gradient of a unit's loss, on the owner of the last stage."""
        at_loss = self._is_at_the_loss(action)
        return self._unit_tokens(action) * self._row_bytes if at_loss else 0.0
