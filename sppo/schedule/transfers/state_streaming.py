"""Placement of the copies of weights and gradients that live in another tier between their uses.

A rank with several stages computes with one stage for a while, then with the next. A *phase* is
such a period: consecutive actions of a rank that read the weights of one stage, or add to its
gradients.

* Weights. `H2D_WEIGHTS` names a stage whose weights are copied to the device, unless they are there
  already; they stay until two other stages have been named. Each phase is preceded by the
  `H2D_WEIGHTS` of the next phase, so weights are copied one phase ahead, into the memory of the
  phase before.
* Gradients. `D2H_GRADIENTS` of a stage comes after each of its phases; the last one comes after its
  REDUCE, too. If a stage has several phases, `H2D_GRADIENTS` brings the accumulated gradients back
  before the last action of the preceding phase, when the latest D2H has freed memory for them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sppo.schedule.encoding import (
    D2H_GRADIENTS,
    H2D_GRADIENTS,
    H2D_WEIGHTS,
    KV,
    REDUCE,
    B,
    EncodedProgram,
    F,
    W,
)
from sppo.schedule.schedule import Schedule

_Indices = npt.NDArray[np.integer]


class _Phases(NamedTuple):
    """Phases of a rank's program: stage, positions of first and last action, [phases] each."""

    stages: _Indices
    first: _Indices
    last: _Indices

    @classmethod
    def of_uses(cls, uses: _Indices, *, stages: _Indices) -> _Phases:
        """Return the phases of the actions at the positions `uses`, of the given stages."""
        changes = np.flatnonzero(np.diff(stages, prepend=-1, append=-1))
        begins, ends = changes[:-1], changes[1:] - 1
        return cls(stages[begins], uses[begins], uses[ends])


def place_state(schedule: Schedule, *, weights: bool, gradients: bool) -> Schedule:
    """Return `schedule` with the copies of weights and gradients that live in another tier.

    Args:
        schedule: Schedule with all actions except messages, of whole units.
        weights: Whether weights live in another tier.
        gradients: Whether gradients live in another tier.
    """
    if not weights and not gradients:
        return schedule
    gradients = gradients and schedule.is_training
    encoded = []
    for program in schedule.encoded:
        stages = program.slots // schedule.num_units
        adds = np.isin(program.codes, (B, W))
        # Forwards of the last stage form the gradients of the head.
        adds |= (program.codes == F) & (stages == schedule.num_stages - 1)
        added, read = (
            _Phases.of_uses(np.flatnonzero(uses), stages=stages[uses])
            for uses in (adds, np.isin(program.codes, (F, KV, B)))
        )
        encoded.append(
            program.insert(
                *([_leaving(program, added)] if gradients else []),
                *([_fetched(read)] if weights else []),
                *([_returning(added)] if gradients else []),
            )
        )
    return replace(schedule, encoded=tuple(encoded))


def _fetched(phases: _Phases) -> tuple[_Indices, EncodedProgram]:
    """Return the H2Ds of weights: that of the first phase, and in each phase that of the next."""
    at = np.concatenate([phases.first[:1], phases.first[:-1]])
    return at, EncodedProgram.of_whole_units(H2D_WEIGHTS, phases.stages)


def _leaving(program: EncodedProgram, phases: _Phases) -> tuple[_Indices, EncodedProgram]:
    """Return the D2Hs of gradients, one after each phase."""
    at = phases.last.copy()
    for index in np.flatnonzero(program.codes == REDUCE).tolist():
        final = np.flatnonzero(phases.stages == program.slots[index])[-1:]
        at[final] = np.maximum(at[final], index)
    return at + 1, EncodedProgram.of_whole_units(D2H_GRADIENTS, phases.stages)


def _returning(phases: _Phases) -> tuple[_Indices, EncodedProgram]:
    """Return the H2Ds of gradients, one in the phase before each further phase of a stage."""
    _, firsts = np.unique(phases.stages, return_index=True)
    again = np.delete(np.arange(phases.stages.size), firsts)
    return phases.last[again - 1], EncodedProgram.of_whole_units(
        H2D_GRADIENTS, phases.stages[again]
    )
