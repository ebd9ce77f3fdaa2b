"""Stage and unit of each action that a rank runs in a step: whole units, and MSP shards."""

from __future__ import annotations

from collections.abc import Mapping

from sppo.engine.msp.shard import cut_shard, local_tokens
from sppo.engine.stage import Stage
from sppo.engine.unit import TokenSpan, Unit
from sppo.parallel.msp_exchange import MspExchange, MspLinks
from sppo.schedule.actions import Action, UnitKey
from sppo.schedule.schedule import Schedule


class StepUnits:
    """Stages of one rank and units of one step, by action.

    Args:
        schedule: Schedule of the step.
        units: Units of the step, with this rank's tokens.
        stages: Stages of this rank, by stage index.
        shard_stages: Stages of which this rank may run shards, by stage index.
        links: Communicators of MSP groups, connected; None if no unit is cut.
        member: Index of this rank in its sequence-parallel group.
    """

    def __init__(
        self,
        schedule: Schedule,
        units: Mapping[UnitKey, Unit],
        *,
        stages: Mapping[int, Stage],
        shard_stages: Mapping[int, Stage],
        links: MspLinks | None,
        member: int,
    ) -> None:
        self._schedule, self._units = schedule, units
        self._stages, self._shard_stages = stages, shard_stages
        self._links, self._member = links, member

    def stage(self, action: Action) -> Stage:
        """Return the stage whose layers an action runs."""
        return (self._stages if action.num_shards == 1 else self._shard_stages)[action.stage]

    def unit(self, action: Action) -> Unit:
        """Return the unit, or the shard, that an action runs on this rank."""
        unit = self._units[action.unit]
        if action.num_shards == 1:
            return unit
        return cut_shard(
            unit,
            shard_index=action.shard,
            member=self._member,
            lengths=self._schedule.msp_groups[self._slot(action)].lengths,
            exchange=self._exchange(action),
        )

    def span(self, unit: UnitKey) -> TokenSpan:
        """Return the positions of a whole unit."""
        return self._units[unit].span

    def tokens(self, unit: UnitKey, end: int) -> int:
        """Return how many of a unit's first ``end`` tokens this rank holds."""
        tokens = self._units[unit].shard_tokens
        return local_tokens(end, tokens[self._member], sum(tokens))

    def meet_peers(self, action: Action) -> None:
        """Make compute wait for the other ranks of the action's MSP group, if it has one."""
        if action.num_shards > 1:
            self._exchange(action).barrier()

    def assert_idle(self) -> None:
        """Assert that the step left nothing over on any stage."""
        for stage in (*self._stages.values(), *self._shard_stages.values()):
            stage.assert_idle()

    def _exchange(self, action: Action) -> MspExchange:
        assert self._links is not None, "a program with shards has communicators"
        ranks = self._schedule.msp_groups[self._slot(action)].ranks
        owner = ranks.index(self._schedule.placement.rank_of(action.stage))
        return self._links.exchange(ranks, owner)

    def _slot(self, action: Action) -> int:
        return self._schedule.slot(action.stage, action.unit)
