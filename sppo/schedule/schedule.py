"""Programs of all ranks of a pipeline for one step.

A `Schedule` says which rank runs which actions in which order, and nothing about times: times are
the output of the simulator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from sppo.schedule.actions import Action, ActionKind, Cut, Lengths, Placement, UnitKey, Wire
from sppo.schedule.encoding import SEND_ACT, SEND_GRAD, EncodedProgram, encode
from sppo.schedule.msp_groups import MspGroup, Route, find_msp_groups, msp_routes


@dataclass(frozen=True)
class Schedule:
    """Pipeline program for all ranks.

    Attributes:
        name: Name of the generator, or the name given in a program file.
        placement: Assignment of stages to ranks.
        lengths: Tokens of every subsequence of every sequence: lengths[sequence][subsequence].
            Message shapes follow from the lengths, so no shapes are exchanged at run time.
        programs: One tuple of actions per rank.
        cuts: Shard lengths of the MSP units whose shards are not of equal length.
    """

    name: str
    placement: Placement
    lengths: Lengths
    programs: tuple[tuple[Action, ...], ...]
    cuts: tuple[Cut, ...] = ()

    def __post_init__(self) -> None:
        if len(self.programs) != self.num_ranks:
            raise ValueError(
                f"{len(self.programs)} programs for {self.num_ranks} ranks: "
                "give one program per rank"
            )

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole pipeline."""
        return self.placement.num_stages

    @property
    def num_sequences(self) -> int:
        """Number of sequences of the step (M)."""
        return len(self.lengths)

    @cached_property
    def num_units(self) -> int:
        """Number of units of the step: subsequences of all sequences together."""
        return sum(len(sequence) for sequence in self.lengths)

    @property
    def num_actions(self) -> int:
        """Number of actions of all ranks together."""
        return sum(len(program) for program in self.programs)

    @property
    def is_training(self) -> bool:
        """True if the programs hold a backward pass (False for evaluation)."""
        backward = ActionKind.B
        return any(action.kind is backward for program in self.programs for action in program)

    @cached_property
    def unit_offsets(self) -> tuple[int, ...]:
        """Index of each sequence's first unit, units numbered over all sequences."""
        return (0, *accumulate(map(len, self.lengths[:-1])))

    @cached_property
    def encoded(self) -> tuple[EncodedProgram, ...]:
        """Programs as integer arrays.

        Raises:
            MalformedActionError: An action that names something the schedule does not have.
        """
        return encode(self.programs, lengths=self.lengths, num_stages=self.num_stages)

    @cached_property
    def msp_groups(self) -> Mapping[int, MspGroup]:
        """Ranks that share a unit, by slot; empty for every schedule without MSP."""
        return find_msp_groups(self.encoded, lengths=self.lengths, cuts=self.cuts)

    @cached_property
    def msp_routes(self) -> Mapping[tuple[int, int], tuple[Route, ...]]:
        """Routes of every message from or to an MSP group, by (opcode of SEND, producing slot)."""
        return msp_routes(self.msp_groups, lengths=self.lengths, placement=self.placement)

    def slot(self, stage: int, unit: UnitKey) -> int:
        """Return the index of a unit on a stage in tables of all stages and units."""
        sequence, subsequence = unit
        return stage * self.num_units + self.unit_offsets[sequence] + subsequence

    def routes(self, wire: Wire, *, producer: int, unit: UnitKey) -> tuple[Route, ...]:
        """Return the routes of a stage's result for a unit; () if no stage takes it.

        A unit that is whole on both stages has one route, even if it stays on its rank.

        Args:
            wire: "act" to the next stage, "grad" to the stage before.
            producer: Stage that makes the result.
            unit: Unit of the result.
        """
        consumer = producer + (1 if wire == "act" else -1)
        if not (0 <= producer < self.num_stages and 0 <= consumer < self.num_stages):
            return ()
        code = SEND_ACT if wire == "act" else SEND_GRAD
        cut = self.msp_routes.get((code, self.slot(producer, unit)))
        if cut is not None:
            return cut
        tokens, rank_of = self.lengths[unit[0]][unit[1]], self.placement.rank_of
        return (Route(rank_of(producer), rank_of(consumer), 0, tokens, tokens),)

    def digest(self) -> str:
        """Return the SHA-256 (hexadecimal) of the whole schedule; equal only for equal schedules.

        Ranks compare digests at start-up, so that no two ranks run different programs.
        """
        state = hashlib.sha256()
        header = (self.name, self.placement, self.lengths, self.cuts)
        state.update(repr(header).encode())
        for program in self.programs:
            state.update(b"\n")
            state.update(" ".join(map(str, program)).encode())
        return state.hexdigest()
