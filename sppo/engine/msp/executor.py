"""MSP shards that one rank runs in a step, as the executor needs them: stage, tokens and peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sppo.activations.activation_layout import ActivationLayout
from sppo.activations.subsequence_placement import SubsequencePlacement
from sppo.engine.msp.shard import MspShard, cut_shard, local_tokens
from sppo.engine.msp.stage import MspStage
from sppo.engine.unit import Unit
from sppo.parallel.msp_exchange import MspExchange
from sppo.schedule.actions import Action, ActionKind, UnitKey
from sppo.schedule.msp_groups import MspGroup
from sppo.schedule.schedule import Schedule

ExchangeOf = Callable[[tuple[int, ...], int], MspExchange]
"""Maps (pipeline ranks of an MSP group, index of the owner among them) to their communication."""


class MspExecutor:
    """Provides the stage, shard and communication of one rank's actions that are MSP shards.

    Args:
        schedule: Schedule of the step.
        stages: Stages of which this rank may run shards, by stage index.
        placements: Placements of the units, by stage.
        exchange_of: Function that returns the communication of an MSP group.
        rank: Pipeline rank of this process.
        member: Index of this rank in its sequence-parallel group.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        stages: Mapping[int, MspStage],
        placements: Mapping[int, Mapping[UnitKey, SubsequencePlacement]],
        exchange_of: ExchangeOf,
        rank: int,
        member: int,
    ) -> None:
        self._schedule, self._stages, self._member = schedule, stages, member
        self._placements, self._exchange_of = placements, exchange_of
        self._backwards = [
            action
            for action in schedule.programs[rank]
            if action.kind is ActionKind.B and action.num_shards > 1
        ]
        self._units: Mapping[UnitKey, Unit] = {}

    def begin(self, units: Mapping[UnitKey, Unit], *, training: bool) -> None:
        """Start a step of ``units``; in training, also lay out the tensors that shards save."""
        self._units = units
        if not training:
            return
        for index, stage in self._stages.items():
            own = [action for action in self._backwards if action.stage == index]
            stage.prepare(
                {action.unit: self.shard(action) for action in own},
                placements=self._placements[index],
            )

    @property
    def layouts(self) -> dict[int, ActivationLayout]:
        """Layout of the tensors that this rank's shards save, by stage that it runs shards of."""
        run = sorted({action.stage for action in self._backwards})
        return {index: self._stages[index].layout for index in run}

    def barrier(self, action: Action) -> None:
        """Make compute wait for the other ranks of the action's MSP group."""
        self._exchange(action).barrier()

    def stage(self, action: Action) -> MspStage:
        """Return the stage whose layers an action runs."""
        return self._stages[action.stage]

    def shard(self, action: Action) -> MspShard:
        """Return the shard that an action runs on this rank."""
        return cut_shard(
            self._units[action.unit],
            shard_index=action.shard,
            member=self._member,
            lengths=self._group(action).lengths,
            exchange=self._exchange(action),
        )

    def tokens(self, unit: UnitKey, end: int) -> int:
        """Return how many of a unit's first ``end`` tokens this rank holds."""
        tokens = self._units[unit].shard_tokens
        return local_tokens(end, tokens[self._member], sum(tokens))

    def assert_idle(self) -> None:
        """Assert that the step left nothing over on any stage."""
        for stage in self._stages.values():
            stage.assert_idle()

    def _group(self, action: Action) -> MspGroup:
        return self._schedule.msp_groups[self._schedule.slot(action.stage, action.unit)]

    def _exchange(self, action: Action) -> MspExchange:
        ranks = self._group(action).ranks
        owner = ranks.index(self._schedule.placement.rank_of(action.stage))
        return self._exchange_of(ranks, owner)
