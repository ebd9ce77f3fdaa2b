"""Memory that one pipeline rank holds action by action, from the program of a step.

Counted are saved tensors from forward to backward, the working set of the running unit or MSP
shard, and messages between stages. For a program without messages, those of the running unit are
counted (:mod:`sppo.cost.memory.unit_messages`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from sppo.activations.placement import ActivationPlacement
from sppo.activations.subsequence_placement import SubsequencePlacement
from sppo.cost.candidate import Candidate
from sppo.cost.live_sets.shard_live_sets import BORROWED_LAYERS, ShardSizes
from sppo.cost.memory.joined_tensors import block_layout, joined_bytes
from sppo.cost.memory.messages_held import MessagesHeld
from sppo.cost.memory.stage_memory import StageMemory, collective_bytes
from sppo.cost.memory.unit_messages import exchanged_bytes, sent_bytes
from sppo.cost.memory.unit_working_sets import loss_bytes, running_bytes, whole_unit_bytes
from sppo.cost.memory.units_in_flight import UnitsInFlight
from sppo.cost.stage_cost import placed_bytes
from sppo.schedule.actions import Action, ActionKind
from sppo.schedule.costs import Table
from sppo.schedule.orders.names import DEFERRING_WEIGHTS
from sppo.schedule.schedule import Schedule


class Peaks(NamedTuple):
    """Peak bytes of a rank over its program.

    Working sets are often largest when little is saved yet, so the figure of working sets is the
    peak of both together minus the peak of saved bytes. The figure of messages is likewise the
    further increase of the peak.
    """

    saved: int
    """Saved tensors."""
    working: int
    """Increase of the peak by working sets."""
    messages: int
    """Increase of the peak by messages and exchanges."""


@dataclass(frozen=True, slots=True)
class Shard:
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

    Args:
        memory: Memory of each rank, with the messages of the running unit.
        candidate: Candidate to price, for which :func:`holds_messages` is true.
        placement: Placement by the activation policy.
        schedule: Schedule with the programs of a step, with messages.
    """
    if not schedule.msp_groups:
        memory = _with_most_kv(memory, UnitsInFlight(candidate))
    collective = collective_bytes(candidate).tolist()
    found = []
    for rank, held in enumerate(memory):
        peaks = RankProgram(candidate, placement, schedule, rank).peaks_with_messages()
        device = replace(
            held.device,
            loss_gradient_bytes=peaks.saved - held.device.activations_bytes,
            working_bytes=peaks.working,
            communication_bytes=collective[rank] + peaks.messages,
        )
        found.append(replace(held, device=device))
    return tuple(found)


def _with_most_kv(memory: tuple[StageMemory, ...], units: UnitsInFlight) -> tuple[StageMemory, ...]:
    """Return the memory of each rank with the peaks of K and V, and of their gradients.

    Working sets and messages of a program are counted without K and V, and may be largest at
    another moment than that at which most is held.
    """
    peaks = zip(units.kv.max(axis=1).tolist(), units.kv_gradients.max(axis=1).tolist(), strict=True)
    return tuple(
        replace(
            held,
            device=replace(held.device, kv_bytes=round(kv), kv_gradients_bytes=round(gradients)),
        )
        for held, (kv, gradients) in zip(memory, peaks, strict=True)
    )


class RankProgram:
    """Program of one pipeline rank, and the memory that it takes.

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
        self.actions = schedule.programs[rank]
        self.own_stages = candidate.stages_of_rank(rank)
        self._whole_sets = {
            stage: whole_unit_bytes(
                candidate, placement, stage=stage, layers=self._layers_counted(stage)
            )
            for stage in self.own_stages
        }
        self._joined = {
            stage: int(
                joined_bytes(placement, block_layout(candidate, stage=stage), stage=stage).max()
            )
            for stage in {action.stage for action in self.actions}
        }
        forwards = [action for action in self.actions if action.kind is ActionKind.F]
        self.whole = [action for action in forwards if action.num_shards == 1]
        """Forwards of units that the rank runs whole."""
        self.shards = {
            (action.stage, *action.unit): self._shard_of(action)
            for action in forwards
            if action.num_shards > 1
        }
        """Shards that the rank runs, by stage, sequence and subsequence."""

    @property
    def lengths(self) -> set[int]:
        """Distinct lengths of the units and shards that the rank runs, in tokens."""
        whole = {self._candidate.lengths[action.unit[1]] for action in self.whole}
        return whole | {shard.tokens for shard in self.shards.values()}

    def placed(self, shard: Shard) -> SubsequencePlacement:
        """Return the retained, offloaded and recomputed rows of a shard."""
        tokens = self._candidate.lengths[shard.subsequence]
        tables = self._placement.retained, self._placement.offloaded, self._placement.recomputed
        retained, offloaded, recomputed = (
            (int(x), int(a), int(rest))
            for x, a, rest in (table[shard.stage, shard.subsequence].tolist() for table in tables)
        )
        whole = SubsequencePlacement(retained, offloaded, recomputed)
        return whole.sharded((shard.tokens, tokens - shard.tokens))[0]

    def peaks(self) -> Peaks:
        """Return the peaks of the program, with the messages of the running unit."""
        return self._peaks(self._with_sent_bytes(), counts_loss=False)

    def peaks_with_messages(self) -> Peaks:
        """Return the peaks of a program with messages.

        Gradients of the loss are then saved tensors, too.
        """
        return self._peaks(self._with_messages_held(), counts_loss=True)

    def _peaks(self, moments: Iterable[tuple[Action, float]], *, counts_loss: bool) -> Peaks:
        """Return the peaks over all forwards and backwards.

        Args:
            moments: Forwards and backwards in their order, with the bytes of messages beside each.
            counts_loss: Whether gradients of the loss, which a forward forms at its end, are held.
        """
        rows = [
            (
                1 if action.kind is ActionKind.F else -1,
                self._saved_bytes(action),
                self._loss_gradient_bytes(action) * counts_loss,
                self._working_bytes(action),
                messages,
            )
            for action, messages in moments
        ]
        begins, saved, loss, working, messages = np.array(rows).reshape(-1, 5).T
        after = np.cumsum(begins * (saved + loss))
        during = np.where(begins > 0, after - loss, after + saved + loss)
        running = during + working
        held, computing, together = (
            float(table.max(initial=0.0)) for table in (after, running, running + messages)
        )
        return Peaks(round(held), round(computing - held), round(together - computing))

    def _with_sent_bytes(self) -> Iterator[tuple[Action, float]]:
        """Yield forwards and backwards, each with the bytes of the messages of its unit."""
        sent, own = sent_bytes(self._candidate), list(self.own_stages)
        bounds = {
            ActionKind.F: sent.forward[own].max(axis=0).tolist(),
            ActionKind.B: sent.backward[own].max(axis=0).tolist(),
        }
        for action in self.actions:
            if action.kind in bounds:
                yield action, bounds[action.kind][action.unit[1]]

    def _with_messages_held(self) -> Iterator[tuple[Action, float]]:
        """Yield forwards and backwards, each with the bytes of all messages that are held."""
        messages = MessagesHeld(self._schedule, rank=self._rank)
        lengths = np.array(self._candidate.lengths, dtype=np.float64)
        exchanged = exchanged_bytes(self._candidate, lengths).tolist()
        for action in self.actions:
            if action.kind is ActionKind.SEND:
                messages.send(action)
            elif action.kind is ActionKind.RECV:
                messages.receive(action)
            elif action.kind in (ActionKind.F, ActionKind.B):
                messages.begin(action)
                tokens: float = messages.tokens + self._handed_out_tokens(action)
                if action.kind is ActionKind.B:
                    tokens = max(tokens, tokens + self._lower_layer_tokens(action, messages))
                yield action, exchanged[action.unit[1]] + tokens * self._row_bytes
                messages.end(action, tokens=self._tokens(action))

    def _shard_of(self, action: Action) -> Shard:
        sequence, index = action.unit
        slot = self._schedule.slot(action.stage, action.unit)
        lengths = self._schedule.msp_groups[slot].lengths
        starts = (0, *accumulate(self._candidate.lengths))
        return Shard(
            action.stage,
            sequence,
            index,
            tokens=lengths[action.shard],
            start=starts[index] + sum(lengths[: action.shard]),
            end=starts[index + 1],
        )

    def _tokens(self, action: Action) -> int:
        """Return the tokens of the unit or shard of an action."""
        if action.num_shards == 1:
            return self._candidate.lengths[action.unit[1]]
        return self.shards[action.stage, *action.unit].tokens

    def _saved_bytes(self, action: Action) -> float:
        """Return the bytes of saved tensors that a forward leaves and a backward frees."""
        share = self._tokens(action) / self._candidate.lengths[action.unit[1]]
        return share * float(self._retained[action.stage, action.unit[1]])

    def _working_bytes(self, action: Action) -> int:
        """Return the bytes of the working set of a unit or a shard."""
        candidate, backward = self._candidate, action.kind is ActionKind.B
        if action.num_shards > 1:
            shard = self.shards[action.stage, *action.unit]
            working = self._shard_bytes(shard)[backward]
        else:
            working = int(self._whole_sets[action.stage][backward][action.unit[1]])
        if backward:
            return working + self._joined[action.stage]
        is_cut = action.num_shards > 1
        if is_cut and action.stage in self.own_stages and candidate.is_last_stage(action.stage):
            loss = loss_bytes(candidate.workload, tokens=candidate.lengths[action.unit[1]])
            # The owner's shard of the gathered output is still alive.
            return max(working, loss + round(self._tokens(action) * self._row_bytes))
        return working

    def _layers_counted(self, stage: int) -> int:
        """Return the layers of a stage whose tensors count: its output's gradient is a message."""
        return min(len(self._candidate.stages[stage]), self._candidate.input_every)

    def _shard_bytes(self, shard: Shard) -> tuple[int, int]:
        """Return the bytes of the working sets of a shard's forward and backward."""
        placed = self.placed(shard)
        return running_bytes(
            self._candidate,
            tokens=shard.tokens,
            prefix=shard.start,
            recomputed=frozenset(index for index, rows in enumerate(placed.recomputed) if rows),
            retained=frozenset(
                index for index, rows in enumerate(placed.retained) if rows == shard.tokens
            ),
            layers=self._layers_counted(shard.stage),
            shard=self._shard_sizes(shard),
        )

    def _shard_sizes(self, shard: Shard) -> ShardSizes:
        is_owner = shard.stage in self.own_stages
        layers = len(self._candidate.stages[shard.stage])
        return ShardSizes(
            self._candidate.lengths[shard.subsequence],
            shard.end,
            0 if is_owner else min(BORROWED_LAYERS, layers),
        )

    def _handed_out_tokens(self, action: Action) -> int:
        """Return the further tokens of a shard's input that the owner of the stage hands out.

        The owner's own part of the first stage's input is a view of that of the whole unit. A
        borrower receives its part of the gradient of the loss; the owner's is a saved tensor.
        """
        if action.num_shards == 1:
            return 0
        is_owner, tokens = action.stage in self.own_stages, self._tokens(action)
        if action.kind is ActionKind.F and action.stage == 0 and is_owner:
            return self._candidate.lengths[action.unit[1]] - tokens
        last = self._candidate.is_last_stage(action.stage)
        return tokens if action.kind is ActionKind.B and last and not is_owner else 0

    def _lower_layer_tokens(self, action: Action, messages: MessagesHeld) -> float:
        """Return the further tokens in the backward of a layer that is not the stage's last.

        Such a layer reads the gradient from the layer above instead of the stage's input, and the
        saved tensors of the layer above are free. A shard's input stays until its backward ends.
        """
        layers = len(self._candidate.stages[action.stage])
        if layers == 1:
            return 0
        input_freed = messages.freed_tokens if action.num_shards == 1 else 0
        saved = self._saved_bytes(action) / layers / self._row_bytes
        return self._tokens(action) - input_freed - saved

    def _loss_gradient_bytes(self, action: Action) -> float:
        """Return the bytes of the gradient of a unit's loss, on the owner of the last stage."""
        stage = action.stage
        if stage not in self.own_stages or not self._candidate.is_last_stage(stage):
            return 0.0
        return self._candidate.lengths[action.unit[1]] * self._row_bytes

    @cached_property
    def _retained(self) -> Table:
        """Bytes of retained tensors of each unit, [stages, N]."""
        return placed_bytes(self._placement, "retained", candidate=self._candidate)

    @property
    def _row_bytes(self) -> float:
        """Bytes of the residual stream per token on one device."""
        workload = self._candidate.workload
        whole = workload.model.hidden_size * workload.element_bytes
        return whole / workload.sequence_parallel_degree
