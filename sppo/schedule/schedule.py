"""Programs of all ranks of a pipeline for one step.

A `Schedule` says which rank runs which actions in which order, and nothing about times: times are
the output of the simulator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from sppo.schedule.actions import Action, Cut, Lengths, Placement, UnitKey, Wire
from sppo.schedule.encoding import SEND_ACT, SEND_GRAD, B, EncodedProgram, decode, encode
from sppo.schedule.graph import Floats
from sppo.schedule.msp_groups import MspGroup, Route, find_msp_groups, msp_routes, shard_shares
from sppo.schedule.step_actions import StepActions


@dataclass(frozen=True)
class Schedule:
    """Pipeline program for all ranks.

    Attributes:
        name: Name of the generator, or the name given in a program file.
        placement: Assignment of stages to ranks.
        lengths: Tokens of every subsequence of every sequence: lengths[sequence][subsequence].
            Message shapes follow from the lengths, so no shapes are exchanged at run time.
        encoded: Program of each rank, as integer arrays.
        cuts: Shard lengths of the MSP units whose shards are not of equal length.
    """

    name: str
    placement: Placement
    lengths: Lengths
    encoded: tuple[EncodedProgram, ...]
    cuts: tuple[Cut, ...] = ()

    def __post_init__(self) -> None:
        if len(self.encoded) != self.num_ranks:
            raise ValueError(
                f"{len(self.encoded)} programs for {self.num_ranks} ranks: "
                "give one program per rank"
            )

    @classmethod
    def of_actions(
        cls,
        name: str,
        placement: Placement,
        lengths: Lengths,
        programs: Sequence[Sequence[Action]],
        cuts: tuple[Cut, ...] = (),
    ) -> Schedule:
        """Return a schedule of given actions.

        Raises:
            MalformedActionError: An action that names something the schedule does not have.
        """
        encoded = encode(programs, lengths=lengths, num_stages=placement.num_stages)
        return cls(name, placement, lengths, encoded, cuts)

    def with_programs(self, programs: Sequence[Sequence[Action]]) -> Schedule:
        """Return the schedule with other actions.

        Raises:
            MalformedActionError: An action that names something the schedule does not have.
        """
        return Schedule.of_actions(self.name, self.placement, self.lengths, programs, self.cuts)

    @cached_property
    def programs(self) -> tuple[tuple[Action, ...], ...]:
        """Program of each rank, as actions."""
        return tuple(decode(program, lengths=self.lengths) for program in self.encoded)

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
        return sum(program.codes.size for program in self.encoded)

    @cached_property
    def actions(self) -> StepActions:
        """Actions of all ranks as columns."""
        return StepActions(self.encoded, lengths=self.lengths, num_stages=self.num_stages)

    @property
    def is_training(self) -> bool:
        """True if the programs hold a backward pass (False for evaluation)."""
        return any(bool((program.codes == B).any()) for program in self.encoded)

    @cached_property
    def unit_offsets(self) -> tuple[int, ...]:
        """Index of each sequence's first unit, units numbered over all sequences."""
        return (0, *accumulate(map(len, self.lengths[:-1])))

    @cached_property
    def msp_groups(self) -> Mapping[int, MspGroup]:
        """Ranks that share a unit, by slot; empty for every schedule without MSP."""
        return find_msp_groups(self.actions, lengths=self.lengths, cuts=self.cuts)

    @cached_property
    def shares(self) -> Floats:
        """Fraction of its unit's tokens that each of `actions` runs; 1 for all but compute."""
        return shard_shares(self.actions, groups=self.msp_groups)

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
        ranks, virtual = self.placement.num_ranks, self.placement.num_virtual
        # Plans that exist hold digests with these words.
        placement = f"Placement(num_ranks={ranks}, num_virtual={virtual}, style='loop')"
        header = f"({self.name!r}, {placement}, {self.lengths!r}, {self.cuts!r})"
        state.update(header.encode())
        for program in self.programs:
            state.update(b"\n")
            state.update(" ".join(map(str, program)).encode())
        return state.hexdigest()
