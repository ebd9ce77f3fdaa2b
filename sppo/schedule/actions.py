"""The intermediate representation of every pipeline this project runs.

A `Schedule` says which rank does what in which order, and nothing about when: time is the
output of the simulator. One rank's program is a tuple of `Action`s; the executor walks it with
one handler per kind.

Conventions, all counted from 0:

* A *unit* is (sequence, subsequence); a *stage* is a run of layers; a *rank* holds one or more
  stages, as the `Placement` says.
* `B` is the whole backward of a unit on a stage, unless the program also holds a `W` for the same
  stage and unit; then `B` is the input-gradient half and `W` the weight-gradient half.
* `D2H` and `H2D` copy the saved tensors of a unit, or with wire "kv" its K and V, where a stage
  does without them between its forward and its backward: `0D2H_KV2.1`, `0H2D_KV2.1`.
* `H2D` with wire "weights", and both with wire "gradients", copy those of a whole stage, where they
  live in another tier: `0H2D_WEIGHTS`, `0D2H_GRADIENTS`; see `state_streaming`.
* `KV` recomputes K and V of a unit from its saved input, where a stage does without them between
  its forward and its backward and they are not copied.
* `SEND` names the stage that produced the tensor and `RECV` the stage that consumes it. The
  activation of stage 0 is therefore `0SEND_ACT2.1` on its sender and `1RECV_ACT2.1` on its
  receiver; its gradient is `1SEND_GRAD2.1` and `0RECV_GRAD2.1`.
* Multiplexed sequence partitioning (MSP) cuts a unit into shards: shard k of g is run by the rank
  whose program holds it, all g shards at the same time. The token counts of the shards are the
  schedule's `cuts`; without an entry there the shards are as equal as whole tokens allow. On
  `SEND` and `RECV`, `shard` and `num_shards` count messages instead: see `communication`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

Wire = Literal["act", "grad", "kv", "weights", "gradients"]
PlacementStyle = Literal["loop", "v"]


class ActionKind(StrEnum):
    """Kinds of actions; the value is the spelling in the text form.

    F forward; KV recomputation of K and V ahead of a stage's backward; B backward (or its
    input-gradient half), all other recomputation included; W weight gradients;
    SEND, RECV messages between stages; D2H, H2D copies to and from the host tier; REDUCE the
    reduction of a stage's gradients over the data-parallel ranks.
    """

    F = "F"
    KV = "KV"
    B = "B"
    W = "W"
    SEND = "SEND"
    RECV = "RECV"
    D2H = "D2H"
    H2D = "H2D"
    REDUCE = "REDUCE"


OF_STAGES = (
    (ActionKind.REDUCE, None),
    (ActionKind.H2D, "weights"),
    (ActionKind.D2H, "gradients"),
    (ActionKind.H2D, "gradients"),
)
"""Kinds and wires of actions that concern a whole stage and name no unit."""
COMPUTE_KINDS = (ActionKind.F, ActionKind.B, ActionKind.W, ActionKind.KV)
"""Kinds that occupy a rank's compute."""
STAGES_HELD = 2
"""Stages of a rank whose weights, or gradients, are on the device at once: one in use, and one that
comes or goes."""


class Action(NamedTuple):
    """One step of one rank's program; a tuple, for programs of large steps have a million of them.

    Attributes:
        kind: What to do.
        stage: The stage it is done for.
        sequence: The sequence of the unit; None for what is done once for a whole stage.
        subsequence: The subsequence of the unit; None likewise.
        wire: What a message carries, "act" or "grad"; what a copy carries that is not the saved
            tensors of a unit, "kv", "weights" or "gradients"; else None.
        shard: Which shard of the unit (which message, for SEND and RECV).
        num_shards: How many shards the unit is cut into on this stage; 1 is the whole unit.
    """

    kind: ActionKind
    stage: int
    sequence: int | None = None
    subsequence: int | None = None
    wire: Wire | None = None
    shard: int = 0
    num_shards: int = 1

    @property
    def unit(self) -> tuple[int, int]:
        """The unit (sequence, subsequence); not defined for what concerns a whole stage."""
        assert self.sequence is not None, f"{self.kind} of stage {self.stage} names no sequence"
        assert self.subsequence is not None, f"{self.kind} of stage {self.stage} names no unit"
        return self.sequence, self.subsequence

    def __str__(self) -> str:
        """The text form: `0F2.1`, `0F2.1[1/3]`, `0SEND_ACT2.1`, `0REDUCE`, `0H2D_WEIGHTS`."""
        wire = f"_{self.wire.upper()}" if self.wire else ""
        if self.sequence is None:
            return f"{self.stage}{self.kind}{wire}"
        shard = f"[{self.shard}/{self.num_shards}]" if self.num_shards > 1 else ""
        return f"{self.stage}{self.kind}{wire}{self.sequence}.{self.subsequence}{shard}"


@dataclass(frozen=True, slots=True)
class Placement:
    """Ranks of stages.

    Attributes:
        num_ranks: Pipeline ranks, at least 1.
        num_virtual: Stages per rank, at least 1.
        style: "loop" places stage s on rank s mod num_ranks; "v" turns round at the ends, so
            that with two stages per rank the first and the last stage share rank 0.
    """

    num_ranks: int
    num_virtual: int = 1
    style: PlacementStyle = "loop"

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_virtual < 1:
            raise ValueError(
                f"placement of {self.num_ranks} ranks with {self.num_virtual} stages each: "
                "both must be at least 1"
            )
        if self.style not in ("loop", "v"):
            raise ValueError(f"placement style {self.style!r}: must be 'loop' or 'v'")

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.num_ranks * self.num_virtual

    def rank_of(self, stage: int) -> int:
        """The rank that holds `stage` (and, for MSP, owns its weights)."""
        assert 0 <= stage < self.num_stages, f"stage {stage} of {self.num_stages}"
        turn, position = divmod(stage, self.num_ranks)
        if self.style == "v" and turn % 2 == 1:
            return self.num_ranks - 1 - position
        return position

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of `rank`, in the order of the layers."""
        return tuple(s for s in range(self.num_stages) if self.rank_of(s) == rank)


@dataclass(frozen=True, slots=True, order=True)
class Cut:
    """Token counts of the shards of one unit on one stage (MSP); they add up to the unit."""

    stage: int
    sequence: int
    subsequence: int
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A pipeline program for all ranks.

    Attributes:
        name: The generator's name, or what a program file calls itself.
        placement: Stages on ranks.
        lengths: Tokens of every subsequence of every sequence: lengths[sequence][subsequence].
            The shape of each message follows from it, so none is exchanged at run time.
        programs: One tuple of actions per rank.
        cuts: Shards of MSP units whose shards are not simply equal.
    """

    name: str
    placement: Placement
    lengths: tuple[tuple[int, ...], ...]
    programs: tuple[tuple[Action, ...], ...]
    cuts: tuple[Cut, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.placement.num_stages

    @property
    def num_sequences(self) -> int:
        """Sequences of the step (M)."""
        return len(self.lengths)

    @property
    def num_units(self) -> int:
        """Units of the step: the subsequences of all sequences together."""
        return sum(len(sequence) for sequence in self.lengths)

    @property
    def num_actions(self) -> int:
        """Actions of all ranks together."""
        return sum(len(program) for program in self.programs)

    @property
    def is_training(self) -> bool:
        """Return whether the programs hold a backward pass (False for evaluation)."""
        backward = ActionKind.B
        return any(action.kind is backward for program in self.programs for action in program)

    def unit_offsets(self) -> tuple[int, ...]:
        """Number of the first unit of each sequence when all units are counted through."""
        offsets, total = [], 0
        for sequence in self.lengths:
            offsets.append(total)
            total += len(sequence)
        return tuple(offsets)

    def digest(self) -> str:
        """SHA-256 (hexadecimal) of the whole schedule; equal only for equal schedules.

        Ranks compare it at start-up, so that two of them never walk different programs.
        """
        state = hashlib.sha256()
        header = (self.name, self.placement, self.lengths, self.cuts)
        state.update(repr(header).encode())
        for program in self.programs:
            state.update(b"\n")
            state.update(" ".join(map(str, program)).encode())
        return state.hexdigest()
