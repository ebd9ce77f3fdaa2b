"""The pieces that one rank runs in a step: which stage, which tokens, with whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from sppo.engine.msp.shard import Piece, cut_piece, local_tokens
from sppo.engine.msp.stage import PieceStage
from sppo.engine.unit import Unit
from sppo.parallel.piece_exchange import PieceExchange
from sppo.schedule.actions import Action, ActionKind, Schedule
from sppo.schedule.encoding import encode
from sppo.schedule.gangs import Gang, find_gangs

UnitKey = tuple[int, int]
ExchangeOf = Callable[[tuple[int, ...], int], PieceExchange]
"""(pipeline ranks of a gang, place of the owner among them) -> how they talk."""


class PieceTeam:
    """What an executor asks when an action is a piece.

    Args:
        schedule: that is run.
        stages: that this rank may run pieces of.
        exchange_of: gives the communicators of a gang.
        rank: this one's position in the pipeline.
        member: its place in its sequence-parallel group.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        stages: Mapping[int, PieceStage],
        exchange_of: ExchangeOf,
        rank: int,
        member: int,
    ) -> None:
        self._schedule, self._stages, self._member = schedule, stages, member
        self._exchange_of = exchange_of
        self._gangs = find_gangs(schedule, programs=encode(schedule))
        self._offsets = schedule.unit_offsets()
        self._backwards = [
            action
            for action in schedule.programs[rank]
            if action.kind is ActionKind.B and action.num_pieces > 1
        ]
        self._units: Mapping[UnitKey, Unit] = {}

    def begin(self, units: Mapping[UnitKey, Unit], *, training: bool) -> None:
        """Start a step with these units."""
        self._units = units
        if not training:
            return
        lengths = dict(enumerate(self._schedule.lengths))
        for index, stage in self._stages.items():
            own = [action for action in self._backwards if action.stage == index]
            stage.prepare(lengths, [self._piece(action) for action in own])

    def meet(self, action: Action) -> None:
        """Wait for the ranks of the other pieces."""
        self._exchange(action).meet()

    def forward(
        self, action: Action, x_cE: Tensor | None, *, loss_scale: float | None
    ) -> tuple[Tensor | None, int]:
        """(output of a piece, its first token among this rank's tokens of the unit)."""
        piece = self._piece(action)
        output = self._stages[action.stage].forward(
            piece, x_cE, self._exchange(action), loss_scale=loss_scale
        )
        return output, piece.own.start

    def backward(self, action: Action, dy_cE: Tensor | None) -> tuple[Tensor | None, int]:
        """(gradient of a piece's input, its first token)."""
        piece = self._piece(action)
        dx = self._stages[action.stage].backward(piece, dy_cE, self._exchange(action))
        return dx, piece.own.start

    def tokens(self, unit: UnitKey, end: int) -> int:
        """Of a unit's first ``end`` tokens, this rank's."""
        parts = self._units[unit].parts
        return local_tokens(end, parts[self._member], sum(parts))

    def assert_idle(self) -> None:
        """Nothing may be left after a step."""
        for stage in self._stages.values():
            stage.assert_idle()

    def discard(self) -> None:
        """Forget a step that failed."""
        for stage in self._stages.values():
            stage.discard()

    def _gang(self, action: Action) -> Gang:
        sequence, subsequence = action.unit
        unit = self._offsets[sequence] + subsequence
        return self._gangs[action.stage * self._schedule.num_units + unit]

    def _piece(self, action: Action) -> Piece:
        return cut_piece(
            self._units[action.unit],
            place=action.piece,
            member=self._member,
            lengths=self._gang(action).lengths,
        )

    def _exchange(self, action: Action) -> PieceExchange:
        ranks = self._gang(action).ranks
        owner = ranks.index(self._schedule.placement.rank_of(action.stage))
        return self._exchange_of(ranks, owner)
