"""Facts on which a unit's working set depends: tokens, prefix, and the placement of its rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sppo.activations.placement import ActivationPlacement, Counts
from sppo.activations.tensor_classes import CLASSES
from sppo.cost.candidate import Candidate


class UnitRun(NamedTuple):
    """A unit, or a shard of one, as its working set depends on it."""

    recomputed: frozenset[int]
    """Tensor classes that backward recomputes."""
    tokens: int
    """All devices of a sequence-parallel group together."""
    prefix: int
    """Tokens of the sequence before it."""
    retained: frozenset[int] = frozenset()
    """Tensor classes of which every row stays on a GPU; empty on a CPU."""

    @classmethod
    def of_kind(cls, kind: int, tokens: int, prefix: int) -> UnitRun:
        """Return the run of a unit of a kind, one of :func:`unit_kinds`."""
        return cls(_classes(kind), tokens, prefix, _classes(kind >> len(CLASSES)))


def unit_runs(
    candidate: Candidate, placement: ActivationPlacement, *, stage: int
) -> tuple[UnitRun, ...]:
    """Return what a stage computes for each subsequence."""
    kinds = unit_kinds(candidate, placement, stage=stage).tolist()
    return tuple(
        UnitRun.of_kind(kind, tokens, start)
        for kind, tokens, start in zip(kinds, candidate.lengths, candidate.prefixes, strict=True)
    )


def unit_kinds(candidate: Candidate, placement: ActivationPlacement, *, stage: int) -> Counts:
    """Return of each subsequence a bit for each class recomputed, then for each retained, [N].

    On a CPU what is retained is copied, to memory that is there before it and after it.
    """
    bits: Counts = 1 << np.arange(len(CLASSES))
    kinds: Counts = (placement.recomputed[stage] > 0) @ bits
    if candidate.workload.hardware.device.kind == "cuda":
        whole = placement.retained[stage] == placement.tokens[:, None]
        kinds = kinds + (whole @ bits << len(CLASSES))
    return kinds


def _classes(bits: int) -> frozenset[int]:
    return frozenset(index for index in range(len(CLASSES)) if bits >> index & 1)
