"""Programs as integer arrays, so that a million actions are made, checked and simulated quickly.

Every action is an opcode, a *slot* and a shard of the slot's unit. A slot is stage * num_units +
unit, or the stage for an action of a whole stage; tables of units on stages are indexed by slot.
:func:`decode` gives the actions by name, for text and for the executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from sppo.schedule.actions import WHOLE_STAGE_ACTIONS, Action, ActionKind, Lengths, Wire

# The order matters: compute kinds come first, so that `code < NUM_COMPUTE` selects compute.
# Opcodes from REDUCE on are actions of whole stages.
F, B, W, KV, D2H, H2D, SEND_ACT, SEND_GRAD, RECV_ACT, RECV_GRAD, D2H_KV, H2D_KV = range(12)
REDUCE, H2D_WEIGHTS, D2H_GRADIENTS, H2D_GRADIENTS = range(12, 16)
NUM_COMPUTE = 4
OPCODES: dict[tuple[ActionKind, Wire | None], int] = {
    (ActionKind.F, None): F,
    (ActionKind.B, None): B,
    (ActionKind.W, None): W,
    (ActionKind.KV, None): KV,
    (ActionKind.D2H, None): D2H,
    (ActionKind.H2D, None): H2D,
    (ActionKind.D2H, "kv"): D2H_KV,
    (ActionKind.H2D, "kv"): H2D_KV,
    (ActionKind.SEND, "act"): SEND_ACT,
    (ActionKind.SEND, "grad"): SEND_GRAD,
    (ActionKind.RECV, "act"): RECV_ACT,
    (ActionKind.RECV, "grad"): RECV_GRAD,
    (ActionKind.REDUCE, None): REDUCE,
    (ActionKind.H2D, "weights"): H2D_WEIGHTS,
    (ActionKind.D2H, "gradients"): D2H_GRADIENTS,
    (ActionKind.H2D, "gradients"): H2D_GRADIENTS,
}
_NAMES = {code: name for name, code in OPCODES.items()}
Codes = npt.NDArray[np.int32]
Positions = npt.NDArray[np.integer] | Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class EncodedProgram:
    """Program of one rank as arrays: opcode, slot, shard and number of shards of each action."""

    codes: Codes
    slots: Codes
    shards: Codes
    num_shards: Codes

    @classmethod
    def of_whole_units(cls, codes: npt.ArrayLike, slots: npt.ArrayLike) -> EncodedProgram:
        """Return a program of actions that are not cut; one code stands for all actions."""
        which = np.asarray(slots, dtype=np.int32)
        shape, dtype = which.shape, which.dtype
        kinds = np.full(shape, codes, dtype)
        return cls(kinds, which, np.zeros(shape, dtype), np.ones(shape, dtype))

    @classmethod
    def joined(cls, parts: Sequence[EncodedProgram]) -> EncodedProgram:
        """Return programs one after the other."""
        columns = zip(*(part.columns for part in parts), strict=True)
        return cls(*map(np.concatenate, columns))

    @property
    def columns(self) -> tuple[Codes, Codes, Codes, Codes]:
        """Columns in the order of the fields."""
        return self.codes, self.slots, self.shards, self.num_shards

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EncodedProgram):
            return NotImplemented
        return all(map(np.array_equal, self.columns, other.columns))

    __hash__ = None  # type: ignore[assignment]

    def take(self, which: npt.NDArray[np.integer | np.bool_]) -> EncodedProgram:
        """Return the actions at some positions, given as indices or as a mask."""
        return EncodedProgram(*(column[which] for column in self.columns))

    def changed(self, code: int) -> EncodedProgram:
        """Return the same units and shards with another opcode."""
        return replace(self, codes=np.full(self.codes.shape, code, self.codes.dtype))

    def insert(self, *inserted: tuple[Positions, EncodedProgram]) -> EncodedProgram:
        """Return the program with more actions.

        Args:
            inserted: Positions and actions: each action comes directly before the action that has
                its position now, or at the end if its position is the number of actions. Actions
                of the same position come in the order of the arguments.
        """
        parts = [actions for _, actions in inserted]
        positions = [*(np.asarray(at) for at, _ in inserted), np.arange(self.codes.size)]
        order = np.argsort(np.concatenate(positions), kind="stable")
        return EncodedProgram.joined([*parts, self]).take(order)


class MalformedActionError(ValueError):
    """Error of an action that names something the schedule does not have."""

    def __init__(self, problem: str, *, rank: int, index: int, action: Action) -> None:
        super().__init__(f"rank {rank}, action {index + 1}, {action}: {problem}")
        self.rank = rank
        self.index = index


def encode(
    programs: Sequence[Sequence[Action]], *, lengths: Lengths, num_stages: int
) -> tuple[EncodedProgram, ...]:
    """Return the programs of all ranks, encoded.

    Args:
        programs: Program of each rank.
        lengths: Tokens of every subsequence of every sequence.
        num_stages: Number of stages of the pipeline.

    Raises:
        MalformedActionError: An action that names a stage or unit outside the schedule, a message
            without a wire, or a shard outside its unit.
    """
    offsets = [*accumulate(map(len, lengths), initial=0)]
    encoded = []
    for rank, program in enumerate(programs):
        rows = []
        for index, action in enumerate(program):
            problem = _problem(action, lengths=lengths, num_stages=num_stages)
            if problem is not None:
                raise MalformedActionError(problem, rank=rank, index=index, action=action)
            slot = action.stage
            if action.sequence is not None:
                sequence, subsequence = action.unit
                slot = slot * offsets[-1] + offsets[sequence] + subsequence
            code = OPCODES[action.kind, action.wire]
            rows.append((code, slot, action.shard, action.num_shards))
        encoded.append(EncodedProgram(*np.array(rows, dtype=np.int32).reshape(-1, 4).T))
    return tuple(encoded)


def decode(program: EncodedProgram, *, lengths: Lengths) -> tuple[Action, ...]:
    """Return the actions of an encoded program of sequences of the given lengths."""
    units: list[tuple[int | None, int | None]]
    units = [(m, n) for m, parts in enumerate(lengths) for n in range(len(parts))]
    names = [_NAMES[code] for code in program.codes.tolist()]
    stages, unit = np.divmod(program.slots, len(units))
    of_stages = program.codes >= REDUCE
    stages = np.where(of_stages, program.slots, stages).tolist()
    units.append((None, None))
    named = [units[index] for index in np.where(of_stages, -1, unit).tolist()]
    rest = program.shards.tolist(), program.num_shards.tolist()
    return tuple(
        Action(kind, stage, sequence, subsequence, wire, shard, num_shards)
        for (kind, wire), stage, (sequence, subsequence), shard, num_shards in zip(
            names, stages, named, *rest, strict=True
        )
    )


def _problem(action: Action, *, lengths: Lengths, num_stages: int) -> str | None:
    """Return what is wrong with `action` on its own, or None."""
    if not 0 <= action.stage < num_stages:
        return f"stage {action.stage} does not exist: there are {num_stages}"
    if (action.kind, action.wire) not in OPCODES:
        return (
            "SEND and RECV carry 'act' or 'grad', D2H may carry 'kv' or 'gradients', H2D 'kv', "
            "'weights' or 'gradients', others nothing"
        )
    if (action.kind, action.wire) in WHOLE_STAGE_ACTIONS:
        whole = action.sequence is None and action.subsequence is None and action.num_shards == 1
        name = str(action._replace(sequence=None)).lstrip("0123456789")
        return None if whole else f"{name} names only a stage"
    if action.sequence is None or not 0 <= action.sequence < len(lengths):
        return f"sequence {action.sequence} does not exist: there are {len(lengths)}"
    parts = len(lengths[action.sequence])
    if action.subsequence is None or not 0 <= action.subsequence < parts:
        return f"sequence {action.sequence} has {parts} subsequences, counted from 0"
    if not 0 <= action.shard < action.num_shards:
        return f"piece {action.shard} of {action.num_shards} does not exist, counted from 0"
    return None
