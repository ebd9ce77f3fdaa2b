"""Working sets of the forwards and backwards of a candidate's units.

A working set is freed when its unit ends, so it is added to the saved tensors held at that moment
(:meth:`sppo.cost.memory.units_in_flight.UnitsInFlight.peak`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from sppo.activations.placement import ActivationPlacement
from sppo.activations.tensor_classes import class_bytes_per_token
from sppo.cost.candidate import Candidate
from sppo.cost.layer import Workload
from sppo.cost.live_sets.shard_live_sets import ShardSizes
from sppo.cost.live_sets.working_set import loss_working_set, working_sets
from sppo.cost.memory.heaviest_runs import runs_of_blocks
from sppo.cost.memory.joined_tensors import block_layout, joined_bytes
from sppo.cost.memory.unit_runs import UnitRun, unit_kinds
from sppo.cost.memory.units_in_flight import Running
from sppo.schedule.costs import Table
from sppo.schedule.orders.names import DEFERRING_WEIGHTS


def computing_bytes(candidate: Candidate, placement: ActivationPlacement) -> Running:
    """Return upper bounds of the working sets of all units, in bytes, [stages, N].

    Neighbouring subsequences of similar length share a bound.
    """
    shape = len(candidate.stages), len(candidate.lengths)
    running = Running(np.zeros(shape), np.zeros(shape))
    by_kind: dict[Hashable, tuple[Table, Table]] = {}
    for stage, layers in enumerate(candidate.stages):
        kind = len(layers), placement.alike[stage], candidate.is_last_stage(stage)
        if kind not in by_kind:
            by_kind[kind] = _computing_of_stage(candidate, placement, stage=stage)
        running.forward[stage], running.backward[stage] = by_kind[kind]
    return running


def loss_bytes(workload: Workload, *, tokens: int) -> int:
    """Return the bytes of the working set of the loss of a subsequence of `tokens`."""
    here = -(-tokens // workload.sequence_parallel_degree)
    return loss_working_set(workload, tokens=here).live_bytes


def run_working_bytes(
    candidate: Candidate, run: UnitRun, *, stage: int, shard: ShardSizes | None = None
) -> tuple[int, int]:
    """Return the bytes of the working sets of a run's forward and backward on a stage.

    The gradient of the stage's output is not included: the first layer of a backward reads it, and
    a later layer reads another in its place.

    Args:
        candidate: Candidate to price.
        run: Unit or MSP shard.
        stage: Stage that runs it.
        shard: Sizes of the MSP shard; None for a whole unit.
    """
    kind = _stage_kind(candidate, stage=stage)
    one_gradient = replace(kind, layers=min(kind.layers, kind.input_every))
    return one_gradient.working_bytes(run, shard=shard)


@dataclass(frozen=True, slots=True)
class _StageKind:
    """Properties of a stage on which the working sets of its units depend."""

    workload: Workload
    layers: int
    """Number of layers of the stage, cut to the number beyond which it makes no difference."""
    input_every: int
    defers: bool
    is_last: bool
    keeps_a_stack: bool

    def working_bytes(self, run: UnitRun, *, shard: ShardSizes | None = None) -> tuple[int, int]:
        """Return the bytes of the working sets of a run's forward and backward on the stage."""
        forward, backward = working_sets(
            self.workload,
            tokens=-(-run.tokens // self.workload.sequence_parallel_degree),
            prefix=run.prefix,
            recomputed=run.recomputed,
            retained=run.retained,
            defers=self.defers,
            input_every=self.input_every,
            layers=self.layers,
            shard=shard,
        )
        return forward.live_bytes, backward.live_bytes


def _stage_kind(candidate: Candidate, *, stage: int) -> _StageKind:
    every = candidate.input_every
    return _StageKind(
        candidate.workload,
        # Layers beyond those that share an input all have the same working set.
        layers=min(len(candidate.stages[stage]), every + 1),
        input_every=every,
        defers=candidate.schedule in DEFERRING_WEIGHTS,
        is_last=candidate.is_last_stage(stage),
        keeps_a_stack=candidate.keeps_a_stack,
    )


def _computing_of_stage(
    candidate: Candidate, placement: ActivationPlacement, *, stage: int
) -> tuple[Table, Table]:
    """Return the working sets of one stage's forwards and backwards, [N] each."""
    kinds = unit_kinds(candidate, placement, stage=stage).tobytes()
    forward, backward = _sets_of_units(
        _stage_kind(candidate, stage=stage), candidate.lengths, candidate.prefixes, kinds
    )
    if candidate.workload.hardware.device.kind == "cuda":
        backward = _with_joined(backward, candidate, placement, stage=stage)
    return forward, backward


@lru_cache(maxsize=256)
def _sets_of_units(
    stage: _StageKind, lengths: tuple[int, ...], prefixes: tuple[int, ...], kinds: bytes
) -> tuple[Table, Table]:
    """Return the working sets of forwards and backwards, without joined tensors, [N] each.

    The tables are cached and must not be modified.

    Args:
        stage: Properties of the stage.
        lengths: Tokens of each subsequence.
        prefixes: Tokens before each subsequence in its sequence.
        kinds: Kind of each subsequence, see :func:`sppo.cost.memory.unit_runs.unit_kinds`, as bytes
            of int64.
    """
    forward, backward = np.zeros(len(lengths)), np.zeros(len(lengths))
    blocks = runs_of_blocks(lengths, prefixes, kinds, keeps_a_stack=stage.keeps_a_stack)
    for block, runs in blocks:
        for run, units in runs:
            sets = stage.working_bytes(run)
            for table, live in zip((forward[block], backward[block]), sets, strict=True):
                table[units] = np.maximum(table[units], live)
        if stage.is_last:
            longest = loss_bytes(stage.workload, tokens=max(lengths[block]))
            forward[block] = np.maximum(forward[block], longest)
    return forward, backward


def _with_joined(
    backward: Table, candidate: Candidate, placement: ActivationPlacement, *, stage: int
) -> Table:
    """Return the bytes of backwards with joined tensors, whose retained parts are freed, [N]."""
    layout, workload = block_layout(candidate, stage=stage), candidate.workload
    joined = joined_bytes(placement, layout, stage=stage)
    sizes = class_bytes_per_token(workload.model, element_bytes=workload.element_bytes)
    is_cut = (placement.retained[stage] > 0) & (placement.offloaded[stage] > 0)
    parts = (placement.retained[stage] * is_cut) @ sizes / layout.shard_count
    found: Table = np.maximum(joined, backward + np.maximum(0, joined - parts))
    return found
