"""Inputs of the working set of a unit: tokens, prefix, and placement by tensor class."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sppo.activations.placement import ActivationPlacement, Counts
from sppo.activations.tensor_classes import CLASSES
from sppo.cost.candidate import Candidate


class UnitRun(NamedTuple):
    """Properties of a unit, or of an MSP shard, on which its working set depends."""

    recomputed: frozenset[int]
    """Tensor classes that backward recomputes."""
    tokens: int
    """Tokens of all devices of a sequence-parallel group together."""
    prefix: int
    """Tokens of the sequence before the unit or shard."""
    retained: frozenset[int] = frozenset()
    """Tensor classes of which every row stays in memory of torch's allocator."""

    @classmethod
    def of_kind(cls, kind: int, tokens: int, prefix: int) -> UnitRun:
        """Return the run of a unit of `kind`, one of :func:`unit_kinds`."""
        return cls(_classes(kind), tokens, prefix, _classes(kind >> len(CLASSES)))


def unit_runs(
    candidate: Candidate, placement: ActivationPlacement, *, stage: int
) -> tuple[UnitRun, ...]:
    """Return the run of each subsequence on a stage."""
    kinds = unit_kinds(candidate, placement, stage=stage).tolist()
    return tuple(
        UnitRun.of_kind(kind, tokens, start)
        for kind, tokens, start in zip(kinds, candidate.lengths, candidate.prefixes, strict=True)
    )


def unit_kinds(candidate: Candidate, placement: ActivationPlacement, *, stage: int) -> Counts:
    """Return a bit mask of each subsequence: classes recomputed, then classes retained whole, [N].

    No retained classes are set if retained tensors are copied to memory that is allocated all the
    time (`Candidate.keeps_a_stack`): the working set then does not depend on them.
    """
    bits: Counts = 1 << np.arange(len(CLASSES))
    kinds: Counts = (placement.recomputed[stage] > 0) @ bits
    if not candidate.keeps_a_stack:
        whole = placement.retained[stage] == placement.tokens[:, None]
        kinds = kinds + (whole @ bits << len(CLASSES))
    return kinds


def _classes(bits: int) -> frozenset[int]:
    return frozenset(index for index in range(len(CLASSES)) if bits >> index & 1)
