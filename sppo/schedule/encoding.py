"""Programs as integer arrays, so that checks and simulations of a million actions stay cheap.

Every action becomes an opcode and a *slot*: stage * num_units + unit, or the stage for an action of
a whole stage. All tables of validator and simulator are indexed by slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
import numpy.typing as npt

from sppo.schedule.actions import WHOLE_STAGE_ACTIONS, Action, ActionKind, Lengths

# The order matters: compute kinds come first, so that `code < NUM_COMPUTE` selects compute.
# Opcodes from REDUCE on are actions of whole stages.
F, B, W, KV, D2H, H2D, SEND_ACT, SEND_GRAD, RECV_ACT, RECV_GRAD, D2H_KV, H2D_KV = range(12)
REDUCE, H2D_WEIGHTS, D2H_GRADIENTS, H2D_GRADIENTS = range(12, 16)
NUM_COMPUTE = 4
_OPCODES = {
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
Codes = npt.NDArray[np.int32]
_NONE = -(2**30)
_OUT_OF_RANGE = 2**30


@dataclass(frozen=True, slots=True, eq=False)
class EncodedProgram:
    """Program of one rank as arrays: opcode, slot, shard and number of shards of each action."""

    codes: Codes
    slots: Codes
    shards: Codes
    num_shards: Codes

    @property
    def is_cut(self) -> bool:
        """True if the rank runs any shard of a unit, or sends a unit in several messages."""
        return bool((self.num_shards > 1).any())


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
    return tuple(
        _encode_program(program, rank=rank, lengths=lengths, num_stages=num_stages)
        for rank, program in enumerate(programs)
    )


def _encode_program(
    program: Sequence[Action], *, rank: int, lengths: Lengths, num_stages: int
) -> EncodedProgram:
    """Encode one program; single actions are inspected only to report a malformed one."""
    columns = dict(zip(Action._fields, zip(*program, strict=True), strict=False))
    named = zip(columns.get("kind", ()), columns.get("wire", ()), strict=True)
    codes = _column([*map(_OPCODES.get, named, repeat(-1))])
    stages, sequences, parts, shards, num_shards = (
        _column(columns.get(name, ()))
        for name in ("stage", "sequence", "subsequence", "shard", "num_shards")
    )
    of_stages = codes >= REDUCE
    known = np.clip(sequences, 0, len(lengths) - 1)
    counts = _column([*map(len, lengths)])
    ends = np.cumsum(counts)
    in_unit = (sequences == known) & (parts >= 0) & (parts < counts[known])
    in_unit &= (shards >= 0) & (shards < num_shards)
    names_stage = (sequences == _NONE) & (parts == _NONE) & (num_shards == 1)
    right = (codes >= 0) & (stages >= 0) & (stages < num_stages)
    right &= np.where(of_stages, names_stage, in_unit)
    for index in np.flatnonzero(~right).tolist():
        action = program[index]
        problem = _problem(action, lengths=lengths, num_stages=num_stages)
        assert problem, f"{action} cannot be encoded, but nothing is wrong with it"
        raise MalformedActionError(problem, rank=rank, index=index, action=action)
    slots = stages * ends[-1] + (ends - counts)[known] + parts
    slots = np.where(of_stages, stages, slots)
    return EncodedProgram(codes, slots.astype(np.int32), shards, num_shards)


def _column(values: Sequence[int | None]) -> Codes:
    """Return integers as an array; integers too large for any schedule become an invalid value."""
    numbers = [_NONE if value is None else value for value in values]
    try:
        return np.array(numbers, dtype=np.int32)
    except OverflowError:
        kept = [v if abs(v) <= _OUT_OF_RANGE else _OUT_OF_RANGE for v in numbers]
        return np.array(kept, dtype=np.int32)


def _problem(action: Action, *, lengths: Lengths, num_stages: int) -> str | None:
    """Return what is wrong with `action` on its own, or None."""
    if not 0 <= action.stage < num_stages:
        return f"stage {action.stage} does not exist: there are {num_stages}"
    if (action.kind, action.wire) not in _OPCODES:
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


def last_subsequence(lengths: Lengths) -> npt.NDArray[np.bool_]:
    """Return for every unit whether it is the last subsequence of its sequence."""
    return np.array(list(chain.from_iterable([False] * (len(s) - 1) + [True] for s in lengths)))


def first_subsequence(lengths: Lengths) -> npt.NDArray[np.bool_]:
    """Return for every unit whether it is the first subsequence of its sequence."""
    return np.array(list(chain.from_iterable([True] + [False] * (len(s) - 1) for s in lengths)))
