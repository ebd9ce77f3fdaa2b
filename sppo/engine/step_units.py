"""Stage and unit of each action that a rank runs in a step: whole units, and MSP shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sppo.engine.msp.shard import cut_shard, local_tokens
from sppo.engine.pipeline import Pipeline
from sppo.engine.stage import Stage
from sppo.engine.unit import Unit
from sppo.parallel.msp_exchange import MspExchange
from sppo.schedule.actions import Action, UnitKey
from sppo.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class StepUnits:
    """Stages of one rank and units of one step, by action.

    Attributes:
        schedule: Schedule of the step.
        units: Units of the step, with this rank's tokens.
        stages: Stages of this rank, by stage index.
        shard_stages: Stages of which this rank may run shards, by stage index.
        pipeline: This rank's part of the pipeline; communicators of MSP groups are connected.
    """

    schedule: Schedule
    units: Mapping[UnitKey, Unit]
    stages: Mapping[int, Stage]
    shard_stages: Mapping[int, Stage]
    pipeline: Pipeline

    def stage(self, action: Action) -> Stage:
        """Return the stage whose layers an action runs."""
        return (self.stages if action.num_shards == 1 else self.shard_stages)[action.stage]

    def of(self, action: Action) -> tuple[Stage, Unit]:
        """Return the stage whose layers an action runs, and the unit or the shard."""
        stage, unit = self.stage(action), self.units[action.unit]
        if action.num_shards == 1:
            return stage, unit
        return stage, cut_shard(
            unit,
            shard_index=action.shard,
            member=self.pipeline.member,
            lengths=self.schedule.msp_groups[self._slot(action)].lengths,
            exchange=self._exchange(action),
        )

    def tokens(self, unit: UnitKey, end: int) -> int:
        """Return how many of a unit's first ``end`` tokens this rank holds."""
        tokens = self.units[unit].shard_tokens
        return local_tokens(end, tokens[self.pipeline.member], sum(tokens))

    def meet_peers(self, action: Action) -> None:
        """Make compute wait for the other ranks of the action's MSP group, if it has one."""
        if action.num_shards > 1:
            self._exchange(action).barrier()

    def _exchange(self, action: Action) -> MspExchange:
        links = self.pipeline.msp_links
        assert links is not None, "a program with shards has communicators"
        ranks = self.schedule.msp_groups[self._slot(action)].ranks
        owner = ranks.index(self.schedule.placement.rank_of(action.stage))
        return links.exchange(ranks, owner)

    def _slot(self, action: Action) -> int:
        return self.schedule.slot(action.stage, action.unit)
