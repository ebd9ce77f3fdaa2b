"""Actions of a pipeline program, and the assignment of stages to ranks.

The program of one rank is a tuple of `Action`s; the executor walks the tuple with one handler per
kind.

Conventions, all counted from 0:

* A *unit* is (sequence, subsequence); a *stage* is a run of consecutive layers; a *rank* holds one
  or more stages, as given by the `Placement`.
* `B` is the whole backward of a unit on a stage, unless the program also holds a `W` for the same
  stage and unit; then `B` is the input-gradient half and `W` the weight-gradient half.
* `D2H` and `H2D` without a wire copy the saved tensors of a unit. With wire "kv" they copy the K
  and V of a unit, on stages that offload K and V between forward and backward: `0D2H_KV2.1`,
  `0H2D_KV2.1`.
* `H2D` with wire "weights", and `D2H` and `H2D` with wire "gradients", copy the weights or
  gradients of a whole stage that live in another tier: `0H2D_WEIGHTS`, `0D2H_GRADIENTS`; see
  `transfers.copies`.
* `KV` recomputes K and V of a unit from its saved input, on stages that drop K and V between
  forward and backward and do not copy them.
* `SEND` names the stage that produced the tensor and `RECV` the stage that consumes it. The
  activation of stage 0 is therefore `0SEND_ACT2.1` on its sender and `1RECV_ACT2.1` on its
  receiver; its gradient is `1SEND_GRAD2.1` and `0RECV_GRAD2.1`.
* Multiplexed sequence partitioning (MSP) cuts a unit into shards: shard k of g is run by the rank
  whose program holds it, all g shards at the same time. The token counts of the shards are in the
  schedule's `cuts`; a unit without an entry there has shards as equal as whole tokens allow. In
  `SEND` and `RECV`, `shard` and `num_shards` count messages instead: see `communication`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple, cast

Wire = Literal["act", "grad", "kv", "weights", "gradients"]


class ActionKind(StrEnum):
    """Kind of an action; the value is its spelling in program text.

    F is a forward; KV recomputes K and V ahead of a stage's backward; B is a backward (or its
    input-gradient half), including all other recomputation; W computes weight gradients; SEND and
    RECV are messages between stages; D2H and H2D are copies to and from the next tier; REDUCE
    reduces a stage's gradients over the data-parallel ranks.
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


class Op:
    """Opcodes: kind of an action and what it carries, as one number.

    Compute comes first, and actions of whole stages, which name no unit, are the last four. These
    are plain integers, because numpy compares arrays with members of an enumeration slowly.
    """

    F = 0
    B = 1
    W = 2
    KV = 3
    D2H = 4
    H2D = 5
    SEND_ACT = 6
    SEND_GRAD = 7
    RECV_ACT = 8
    RECV_GRAD = 9
    D2H_KV = 10
    H2D_KV = 11
    REDUCE = 12
    H2D_WEIGHTS = 13
    D2H_GRADIENTS = 14
    H2D_GRADIENTS = 15


NUM_COMPUTE = 4
"""Number of opcodes of compute, the first ones."""


def _kind_and_wire(name: str) -> tuple[ActionKind, Wire | None]:
    kind, _, wire = name.partition("_")
    return ActionKind(kind), cast("Wire | None", wire.lower() or None)


OPCODES: Mapping[tuple[ActionKind, Wire | None], int] = {
    _kind_and_wire(name): code for name, code in vars(Op).items() if name.isupper()
}
"""Opcodes by kind and wire."""
WHOLE_STAGE_ACTIONS = tuple(name for name, code in OPCODES.items() if code >= Op.REDUCE)
"""Kinds and wires of actions that apply to a whole stage and name no unit."""
COMPUTE_KINDS = (ActionKind.F, ActionKind.B, ActionKind.W, ActionKind.KV)
"""Kinds that occupy a rank's compute."""
UNITS_AHEAD = 3
"""Number of units that a stage without a backward may be ahead of the next rank's stage in a
training step. The next stage then runs one while two wait for it or are on their way, as many as
memory is planned for. Stages with a backward are held back by their gradients instead."""
RESIDENT_STAGES = 2
"""Number of stages of a rank whose weights, or gradients, are on the device at once: one in use
and one being copied."""

UnitKey = tuple[int, int]
"""Key of a unit: (sequence, subsequence)."""
Lengths = tuple[tuple[int, ...], ...]
"""Tokens of every subsequence of every sequence: lengths[sequence][subsequence]."""


class Action(NamedTuple):
    """Action of one rank's program.

    A named tuple, because programs of large steps have a million actions.

    Attributes:
        kind: What to do.
        stage: Stage that the action belongs to.
        sequence: Sequence of the unit; None for an action of a whole stage.
        subsequence: Subsequence of the unit; None for an action of a whole stage.
        wire: Content of a message, "act" or "grad"; content of a copy, "kv", "weights" or
            "gradients", or None for the saved tensors of a unit; None for other kinds.
        shard: Index of the shard of the unit (of the message, for SEND and RECV).
        num_shards: Number of shards of the unit on this stage; 1 is the whole unit.
    """

    kind: ActionKind
    stage: int
    sequence: int | None = None
    subsequence: int | None = None
    wire: Wire | None = None
    shard: int = 0
    num_shards: int = 1

    @property
    def unit(self) -> UnitKey:
        """Unit (sequence, subsequence); not defined for actions of a whole stage."""
        assert self.sequence is not None, f"{self.kind} of stage {self.stage} names no sequence"
        assert self.subsequence is not None, f"{self.kind} of stage {self.stage} names no unit"
        return self.sequence, self.subsequence

    def __str__(self) -> str:
        """Return program text: `0F2.1`, `0F2.1[1/3]`, `0SEND_ACT2.1`, `0REDUCE`, `0H2D_WEIGHTS`."""
        kind, stage, sequence, subsequence, wire, shard, num_shards = self
        of_wire = f"_{wire.upper()}" if wire else ""
        if sequence is None:
            return f"{stage}{kind}{of_wire}"
        of_shard = f"[{shard}/{num_shards}]" if num_shards > 1 else ""
        return f"{stage}{kind}{of_wire}{sequence}.{subsequence}{of_shard}"


@dataclass(frozen=True, slots=True)
class Placement:
    """Assignment of stages to ranks: stage s is on rank s mod num_ranks.

    Attributes:
        num_ranks: Pipeline ranks, at least 1.
        num_virtual: Stages per rank, at least 1.
    """

    num_ranks: int
    num_virtual: int = 1

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_virtual < 1:
            raise ValueError(
                f"placement of {self.num_ranks} ranks with {self.num_virtual} stages each: "
                "both must be at least 1"
            )

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole pipeline."""
        return self.num_ranks * self.num_virtual

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds `stage` (and, for MSP, owns its weights)."""
        assert 0 <= stage < self.num_stages, f"stage {stage} of {self.num_stages}"
        return stage % self.num_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of `rank`, in the order of the layers."""
        return tuple(range(rank, self.num_stages, self.num_ranks))


class Cut(NamedTuple):
    """Token counts of the shards of one unit on one stage (MSP); their sum is the unit's length."""

    stage: int
    sequence: int
    subsequence: int
    lengths: tuple[int, ...]


def sequences_in_flight(actions: Iterable[Action]) -> int:
    """Return the largest number of consecutive sequences that a stage, or a rank, holds at once.

    A sequence is held from its first F to its last B or W; sequences begin in order.

    Args:
        actions: Actions of one stage, or of all stages of a rank, in program order.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, action in enumerate(actions):
        if action.sequence is None:
            continue
        if action.kind is ActionKind.F:
            first.setdefault(action.sequence, position)
        elif action.kind in (ActionKind.B, ActionKind.W):
            last[action.sequence] = position
    most = 1
    for sequence, begin in first.items():
        held = [other for other in range(sequence) if last.get(other, -1) > begin]
        most = max(most, sequence - min(held) + 1 if held else 1)
    return most
