"""Planner of steps of samples: packings of their samples, and the fastest that fits.

A run of samples has an execution plan for its longest samples, which fixes degrees, schedule and
policy and fits in memory. A step is planned from this plan once its samples are known. The samples
are packed into subsequences of several sizes. For the packings of least estimated time, the policy
places activations as for any candidate; the packing that fits and simulates fastest is taken. In
a pipeline its weight gradients are then deferred if that simulates faster.

Subsequences that take t on one device take about ``(sum t + (p - 1) / v max t) / p`` on a pipeline
of p ranks with v stages each, the time of a flow shop of equal machines. Packings are ranked by
this estimate.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from sppo.activations.placement import ROW_ALIGNMENT
from sppo.cost.candidate import Candidate
from sppo.cost.state_tiers import ON_DEVICE
from sppo.cost.workload import ACCUMULATION_BYTES
from sppo.planning.elastic.levels import fastest_levels
from sppo.planning.elastic.mesh import SliceMesh, equal_mesh, mesh_of_first_slice, planned_mesh
from sppo.planning.elastic.packing import (
    PackedSamples,
    divide_samples,
    pack_samples,
    subsequence_seconds,
)
from sppo.planning.elastic.sample_cost import SampleCost, sample_cost
from sppo.planning.elastic.sample_shortfall import shortfall_text
from sppo.planning.elastic.step_correction import StepCorrection
from sppo.planning.elastic.step_plan import StepPlan
from sppo.planning.plan import ExecutionPlan
from sppo.planning.search.choices import SUBSEQUENCE_TOKENS
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.evaluation import WORTH_IT, evaluate_candidate
from sppo.schedule.orders.names import LOOPED, WHOLE_SEQUENCES

LEAST_TOKENS = 256
"""Tokens below which subsequences are not cut to fill a pipeline."""
_MOST_PER_RANK = 128
"""Subsequences per pipeline rank above which smaller subsequences are not tried."""
_ROOMS = (2, 1)
"""Most tokens of a subsequence of several samples, relative to a first slice. Short samples take
less attention, so equal time allows more tokens."""
_LEAST_SLICES = (1 / 8, 0.0, 1 / 4, 1 / 2)
"""Least tokens of later slices, relative to a first slice."""
_HALF_STEPS = (2**-0.5, 2**0.5)
"""Factors of the best first slice that are tried between powers of two."""
_SHORT_SAMPLES = 4096
"""Most tokens of first slices that are tried; twice the longest sample if that is more."""
_PRICED = 4
"""Tokens of the largest subsequence that is priced, relative to the largest first slice."""
_INTERLEAVED = "interleaved_seq1f1b"
_ZERO_BUBBLE = "seq_zb_h1"
_SIMULATED = 3
"""Number of packings that fit with everything retained after which the search ends."""
_MOST_SIMULATED = 6
"""Number of packings that fit, with any placement, after which the search ends."""
_LEVELLED = 3
"""Number of packings whose activations are also placed by levels."""


@dataclass(frozen=True, slots=True)
class StepPlanner:
    """Planner of steps of samples for one replica of a run.

    Attributes:
        base: Candidate of the run's plan, a sequence as long as the longest sample; its sequences
            are replaced in each step.
        alignment: Cuts of samples fall on multiples of this number.
        tries_sizes: Whether samples may be cut at other positions than the run's plan does.
        interleaves: Whether a plan in the looped order may instead overlap sequences, by
            interleaved Seq1F1B on the same stages.
        defers_weights: Whether weight gradients may be deferred to fill bubbles (zero bubble).
        corrects_plans: Whether corrections apply to plans, too, not only to their predictions.
        quick: Whether to take the first packing that fits, with activations placed by the policy.
            If none fits, everything is searched.
    """

    base: Candidate
    alignment: int
    tries_sizes: bool
    interleaves: bool = False
    defers_weights: bool = False
    corrects_plans: bool = False
    quick: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return sum(self.base.lengths)

    @property
    def cost(self) -> SampleCost:
        """Cost model of parts of samples."""
        return sample_cost(self.base.workload, most_tokens=_PRICED * self._most_first)

    @property
    def multiple(self) -> int:
        """Number of tokens to a multiple of which subsequences are padded.

        On a CPU, matrix products in half precision compile code for every number of rows, MiBs that
        are never freed. With 600 random lengths and a hidden size of 128, steps without padding
        took 1.4 GiB and three times as long.
        """
        workload = self.base.workload
        narrow = workload.element_bytes < ACCUMULATION_BYTES
        on_cpu = workload.hardware.device.kind == "cpu"
        return ROW_ALIGNMENT if narrow and on_cpu else 1

    def plan_replica(
        self, lengths: Sequence[int], correction: StepCorrection | None = None, *, replica: int
    ) -> StepPlan:
        """Divide the samples of a step over replicas, and plan one replica. Deterministic.

        The program, its digest and predictions are also computed, so that a process that plans
        ahead does all work.

        Args:
            lengths: Tokens of each sample of the step, of all replicas.
            correction: Correction of the predictions, from measured times of earlier steps.
            replica: Index of the replica to plan.

        Raises:
            MemoryError: No plan fits.
            ValueError: There are fewer samples than replicas.
        """
        planner = self
        if self.corrects_plans and correction is not None:
            workload = replace(self.base.workload, correction=correction.compute)
            planner = replace(self, base=replace(self.base, workload=workload))
        replicas = planner.divided(lengths)
        plan = planner.plan([lengths[index] for index in replicas[replica]])
        plan = replace(plan, replicas=replicas, correction=correction)
        assert plan.digest, "a plan has a program, and both have a digest"
        assert plan.predicted_s >= 0 <= plan.uncorrected_actions_s, "times are not negative"
        return plan

    def divided(self, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the samples of each replica, as indices among the samples of the step.

        Args:
            lengths: Tokens of each sample of the step.

        Raises:
            ValueError: There are fewer samples than replicas.
        """
        seconds = self.cost.of_samples(lengths)
        return divide_samples(seconds, replicas=self.base.data_parallel_degree)

    def plan(self, lengths: Sequence[int]) -> StepPlan:
        """Return the fastest plan that fits, for samples of these lengths.

        Raises:
            MemoryError: No plan fits.
        """
        packings, short = self.packings(lengths), list[EvaluatedCandidate]()
        for bases in self._bases():
            found = [
                plan for base in bases for plan in self._fitting(packings, base=base, short=short)
            ]
            if found:
                fastest = min(found, key=lambda plan: plan.step_s)
                return self._with_best_schedule(fastest)
        # Fall back to the cuts of the run's plan, one sequence after another.
        for bases in self._bases():
            found = self._fitting([self.as_planned(lengths)], base=bases[-1], short=short)
            if found:
                return found[0]
        if self.quick:
            return replace(self, quick=False).plan(lengths)
        raise MemoryError(shortfall_text(lengths, short))

    def _bases(self) -> Iterator[tuple[Candidate, ...]]:
        """Yield groups of base candidates; the fastest of the first group that fits is used.

        Candidates that may overlap sequences come first, then candidates that run one sequence
        after another.
        """
        if self.interleaves:
            yield replace(self.base, schedule=_INTERLEAVED, kv="retained"), self.base
            return
        yield (self.base,)
        if self.base.schedule != LOOPED and self.base.pipeline_parallel_degree > 1:
            yield (replace(self.base, schedule=LOOPED),)

    def _fitting(
        self,
        packings: Sequence[PackedSamples],
        *,
        base: Candidate,
        short: list[EvaluatedCandidate],
    ) -> list[StepPlan]:
        """Return the first plans that fit; append candidates that do not fit to `short`.

        A packing is skipped if one whose largest subsequence is no larger did not fit. The search
        ends once a plan is faster than the estimates of all further packings.
        """
        found: list[StepPlan] = []
        pressed: list[tuple[PackedSamples, Candidate]] = []
        largest = None
        chooses_levels = not self.quick and base.policy == "hybrid" and base.offload_ratio is None
        for packing in packings:
            fastest = min((plan.step_s for plan in found), default=None)
            retaining = sum(plan.evaluated.effective_policy == "retain" for plan in found)
            if retaining == _SIMULATED or len(found) == _MOST_SIMULATED or (self.quick and found):
                break
            if fastest is not None and fastest <= packing.least_s:
                break
            if largest is not None and packing.most_tokens >= largest:
                continue
            evaluated = evaluate_candidate(base.with_packed(packing.sequences))
            if evaluated.shortfall is None:
                found.append(StepPlan(packing, evaluated))
            else:
                short.append(evaluated)
                largest = packing.most_tokens
            if chooses_levels and evaluated.effective_policy != "retain":
                pressed.append((packing, evaluated.candidate))
        levelled = 0
        for packing, candidate in pressed:
            placed = fastest_levels(candidate) if levelled < _LEVELLED else None
            if placed is not None:
                levelled += 1
                found.append(StepPlan(packing, placed))
        return found

    def _with_best_schedule(self, plan: StepPlan) -> StepPlan:
        """Return `plan`, or its zero-bubble variant if deferring weight gradients is faster."""
        if not self.defers_weights or plan.evaluated.candidate.forwards_before_backward:
            return plan
        base = replace(self.base, schedule=_ZERO_BUBBLE)
        evaluated = evaluate_candidate(base.with_packed(plan.sequences))
        is_faster = evaluated.shortfall is None and evaluated.step_s <= plan.step_s * WORTH_IT
        return StepPlan(plan.packed, evaluated) if is_faster else plan

    def packings(self, lengths: Sequence[int]) -> list[PackedSamples]:
        """Return the packings to try, by estimated time, the fastest first.

        Args:
            lengths: Tokens of each sample.
        """
        if not self.tries_sizes:
            found = [self.as_planned(lengths)]
        elif self.base.pipeline_parallel_degree == 1:
            meshes = [equal_mesh(self.longest, size) for size in self._equal_sizes]
            found = [self.as_planned(lengths), *(self._packed(lengths, mesh) for mesh in meshes)]
        else:
            rough = {first: self._sized(lengths, first) for first in self._first_slices(lengths)}
            found = [*rough.values()]
            if not self.quick:
                best = min(rough, key=lambda first: rough[first].least_s)
                found += self._between(lengths, best, smaller=[one for one in rough if one < best])
        different = {packing.sequences: packing for packing in found}
        return sorted(different.values(), key=lambda packing: packing.least_s)

    def as_planned(self, lengths: Sequence[int]) -> PackedSamples:
        """Return the packing by the cuts of the run's plan."""
        balanced = self.base.pipeline_parallel_degree > 1
        return self._packed(lengths, planned_mesh(self.cost, self.base.lengths, balanced=balanced))

    @property
    def _equal_sizes(self) -> list[int]:
        """Tokens of slices to try on one pipeline rank, where nothing waits."""
        workload = self.base.workload
        _, room = SUBSEQUENCE_TOKENS[workload.hardware.device.kind]
        # All devices together may hold a subsequence of as many times the room.
        most = min(self.longest, room * workload.sequence_parallel_degree)
        sizes = [room // 2]
        while sizes[-1] < most:
            sizes.append(2 * sizes[-1])
        return sizes

    def _first_slices(self, lengths: Sequence[int]) -> list[int]:
        """Return the tokens of a first slice to try.

        These double from the least, and give each rank at least one subsequence and not too many.
        """
        each_s = sum(self.cost.of_samples(lengths)) / self.base.pipeline_parallel_degree
        doublings = int(np.log2(self._most_first / self._least_first))
        sizes = self._least_first * 2.0 ** np.arange(max(1, doublings + 1))
        seconds = np.array(self.cost.of_samples(sizes.astype(np.int64).tolist()))
        fits = (seconds <= each_s) & (seconds * _MOST_PER_RANK >= each_s)
        if fits.any():
            return [int(size) for size in sizes[fits]]
        # With much work even the largest size makes many units; with little, take the smallest.
        return [int(sizes[-1]) if seconds[-1] <= each_s else self._least_first]

    def _between(
        self, lengths: Sequence[int], best: int, *, smaller: Sequence[int]
    ) -> Iterator[PackedSamples]:
        """Yield packings by first slices near the best that doubles, and by other limits.

        Args:
            lengths: Tokens of each sample.
            best: Tokens of the best first slice.
            smaller: Tokens of smaller first slices.
        """
        for factor in _HALF_STEPS:
            yield self._sized(lengths, best * factor)
        for least in _LEAST_SLICES:
            for room in _ROOMS:
                yield self._sized(lengths, best, least=least, room=room)
        # If memory is short, the largest packing that fits lies between these sizes.
        for first in smaller:
            for factor in (1.0, _HALF_STEPS[1]):
                yield self._sized(lengths, first * factor, room=_ROOMS[1])

    @property
    def _least_first(self) -> int:
        """Tokens of the smallest first slice to try."""
        return max(LEAST_TOKENS, self.base.workload.sequence_parallel_degree)

    @property
    def _most_first(self) -> int:
        """Tokens of the largest first slice to try."""
        return max(2 * self.longest, _SHORT_SAMPLES)

    def _sized(
        self,
        lengths: Sequence[int],
        first: float,
        *,
        least: float = _LEAST_SLICES[0],
        room: float = _ROOMS[0],
    ) -> PackedSamples:
        """Return the packing into subsequences that take as long as a first slice."""
        first = max(self._least_first, round(first))
        mesh = mesh_of_first_slice(
            self.cost,
            longest=self.longest,
            first=first,
            least=max(round(least * first), self.base.workload.sequence_parallel_degree),
            room=round(room * first),
            alignment=min(self.alignment, first),
        )
        return self._packed(lengths, mesh)

    def _packed(self, lengths: Sequence[int], mesh: SliceMesh) -> PackedSamples:
        """Return the packing by a mesh, with its estimated time."""
        packed = pack_samples(
            lengths,
            cost=self.cost,
            mesh=mesh,
            least_tokens=self.base.workload.sequence_parallel_degree,
            multiple=self.multiple,
        )
        seconds = subsequence_seconds(packed, cost=self.cost)
        ranks = self.base.pipeline_parallel_degree
        filling_s = (ranks - 1) / self.base.virtual_stages * seconds.max()
        return replace(packed, least_s=float(seconds.sum() + filling_s) / ranks)


def plan_pickled(
    planner: bytes, lengths: Sequence[int], correction: StepCorrection | None, *, replica: int
) -> StepPlan:
    """Call :meth:`StepPlanner.plan_replica` of a pickled planner, which is unpickled once."""
    return _unpickled(planner).plan_replica(lengths, correction, replica=replica)


@lru_cache(maxsize=1)
def _unpickled(planner: bytes) -> StepPlanner:
    """Return the unpickled planner, the same object in every step, so its caches stay valid."""
    found = pickle.loads(planner)
    assert isinstance(found, StepPlanner), f"a {type(found).__name__} is no planner"
    return found


def step_planner(plan: ExecutionPlan, *, background_saves: bool = False) -> StepPlanner:
    """Return the planner of steps of a run of samples.

    Args:
        plan: Execution plan of the run, for its longest samples.
        background_saves: Whether checkpoints are copied in memory and written during training.
    """
    return planner_of_candidate(plan.candidate(), run=plan.run, background_saves=background_saves)


def planner_of_candidate(
    candidate: Candidate, *, run: Mapping[str, Any], background_saves: bool = False
) -> StepPlanner:
    """Return the planner of steps of a run of samples with the degrees of a candidate.

    Args:
        candidate: Candidate of a step of the longest samples, with everything decided.
        run: Keys of the run that its plan rests on, by section.
        background_saves: Whether checkpoints are copied in memory and written during training.
    """
    workload = candidate.workload
    shards_weights = (
        workload.sequence_parallel == "megatron" and workload.sequence_parallel_degree > 1
    )
    # MSP does not cut units of packed samples, so use the order of the schedule without MSP.
    schedule = candidate.order
    is_open = (
        run["parallel"]["schedule"] == "auto"
        and candidate.pipeline_parallel_degree > 1
        and candidate.state == ON_DEVICE
    )
    # If the schedule is open, every step decides whether to defer weight gradients.
    defers_weights = (
        is_open and candidate.virtual_stages == 1 and schedule in ("sppo", _ZERO_BUBBLE)
    )
    schedule = "sppo" if defers_weights else schedule
    policy, ratio = run["activations"]["policy"], run["activations"]["offload_ratio"]
    sequence = run["sequence"]
    is_free = sequence["num_subsequences"] == "auto" and schedule not in WHOLE_SEQUENCES
    return StepPlanner(
        replace(
            candidate,
            schedule=schedule,
            policy="hybrid" if policy == "auto" else policy,
            offload_ratio=None if ratio == "auto" else ratio,
            # Where weights are sharded, tensors are recomputed whole or not at all.
            allow_partial=candidate.tier != "device" and not shards_weights,
            background_saves=background_saves,
        ),
        alignment=sequence["alignment"],
        tries_sizes=is_free,
        interleaves=is_open and schedule == LOOPED and candidate.virtual_stages > 1,
        defers_weights=defers_weights,
    )
