"""The plan of one step of samples: sequences, program, placements, and what comes of them.

A run of samples has a plan for its longest ones, which chose degrees, schedule and policy and fits
in the memory there is. A step is planned from it when its samples are known: they are packed into
subsequences of several sizes. Those that take t on one device take a pipeline of p ranks with v
stages each about ``(sum t + (p - 1) / v max t) / p``, for a flow shop of equal machines does. Of
the packings that are best by this, the policy places activations as it does those of any candidate,
and the fastest that fits, as simulated, is run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from sppo.activations.placement import ROW_ALIGNMENT, SubsequencePlacement
from sppo.activations.tensor_classes import ATTENTION, LINEAR
from sppo.cost.candidate import Candidate
from sppo.cost.correction import CostCorrection
from sppo.cost.flops import executed_step_flops
from sppo.cost.layer import ACCUMULATION_BYTES
from sppo.cost.packed_sequence import PackedSequence
from sppo.cost.state_tiers import ON_DEVICE
from sppo.planning.elastic.levels import everything_recomputed, fastest_levels
from sppo.planning.elastic.mesh import SliceMesh, mesh_of_first_slice, mesh_of_slices
from sppo.planning.elastic.packing import PADDING, PackedSamples, pack_samples, subsequence_seconds
from sppo.planning.elastic.pipeline_bounds import least_pipeline_s
from sppo.planning.elastic.replicas import divide_samples
from sppo.planning.elastic.sample_cost import SampleCost, sample_cost
from sppo.planning.elastic.sample_shortfall import shortfall_text
from sppo.planning.make_plan import compute_seconds, stage_plans
from sppo.planning.plan import ExecutionPlan
from sppo.planning.plan_program import plan_candidate
from sppo.planning.search.candidate_search import WORTH_IT
from sppo.planning.search.choices import SUBSEQUENCE_TOKENS
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate, assess
from sppo.planning.search.simulated_candidate import simulate_candidate, simulated_device_bytes
from sppo.schedule.actions import Schedule
from sppo.schedule.generators import LOOPED, WHOLE_SEQUENCES

_INTERLEAVED = "interleaved_seq1f1b"
_ZERO_BUBBLE = "seq_zb_h1"
LEAST_TOKENS = 256
"""Subsequences are not cut shorter than this to fill a pipeline."""
_MOST_PER_RANK = 128
"""Subsequences for each pipeline rank above which smaller ones are not tried."""
_ROOMS = (2, 1)
"""Tokens of several samples in a subsequence, over those of a first slice: beside less attention
there is time for more."""
_LEAST_SLICES = (1 / 8, 0.0, 1 / 4, 1 / 2)
"""Tokens of later slices at least, over those of a first slice."""
_HALF_STEPS = (2**-0.5, 2**0.5)
"""Tokens of first slices that are tried between powers of two."""
_SHORT_SAMPLES = 4096
"""Tokens up to which first slices are tried where all samples are shorter; else to twice those."""
_PRICED = 4
"""Tokens of the largest subsequence over those of the largest first slice that is tried."""
_SIMULATED = 3
"""Packings that fit, everything retained, of which the fastest is taken."""
_MOST_SIMULATED = 6
"""Packings that fit of which it is taken where activations cannot stay."""
_LEVELLED = 3
"""Number of these packings whose activations are placed by integer program, too."""


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Packed samples of one replica in one step, and how they run.

    Attributes:
        packed: Its samples, as they are packed.
        evaluated: The candidate that was chosen, with its simulation.
    """

    packed: PackedSamples
    evaluated: EvaluatedCandidate

    @property
    def num_samples(self) -> int:
        """Samples of the step."""
        return sum(index != PADDING for samples in self.packed.samples for index in samples)

    @property
    def tokens(self) -> int:
        """Tokens of all of them, padding included."""
        return sum(sequence.tokens for sequence in self.sequences)

    @property
    def sequences(self) -> tuple[PackedSequence, ...]:
        """Return the sequences that the samples are packed into."""
        return self.packed.sequences

    @cached_property
    def program(self) -> Schedule:
        """The program of the step."""
        evaluated = self.evaluated
        return evaluated.executed_program()

    @cached_property
    def digest(self) -> str:
        """Digest of what ranks must have alike: program, placements, and which samples where."""
        content = repr((self.program.digest(), self.packed.samples, self.placements))
        return hashlib.sha256(content.encode()).hexdigest()

    @cached_property
    def placements(self) -> tuple[tuple[tuple[SubsequencePlacement, ...], ...], ...]:
        """Return the placement of each subsequence of each sequence, by stage."""
        sequences = self.evaluated.candidate.distinct_sequences
        return tuple(
            tuple(stage.subsequences[own] for own in sequences)
            for stage in stage_plans(self.evaluated)
        )

    @property
    def step_s(self) -> float:
        """Simulated seconds, with the update."""
        return self.evaluated.step_s

    @property
    def phases_s(self) -> tuple[float, float, float]:
        """Seconds of forwards, of backwards, and of the update, of the busiest rank."""
        return (*compute_seconds(self.evaluated), self.evaluated.time.update_s)

    @property
    def executed_flops(self) -> int:
        """FLOPs that the step executes, with what it recomputes."""
        candidate, recomputed = self.evaluated.candidate, self.evaluated.placement.recomputed
        layers = np.array([len(stage) for stage in candidate.stages], dtype=np.float64)
        rows = np.tensordot(layers / layers.sum(), recomputed, axes=1)
        shares = rows / np.array(candidate.lengths)[:, None]
        return executed_step_flops(
            candidate.workload.model,
            candidate.sample_parts,
            linear_recomputed=shares[:, LINEAR],
            attention_recomputed=shares[:, ATTENTION],
        )

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all pipeline ranks, as simulated."""
        assert self.evaluated.played is not None, "every plan of a step is simulated"
        return self.evaluated.played.bubble_fraction

    @property
    def device_peak_bytes(self) -> int:
        """Simulated memory of the fullest device."""
        return max(simulated_device_bytes(self.evaluated) or (self.evaluated.device_peak_bytes,))

    @property
    def num_split(self) -> int:
        """Subsequences that are slices of a long sample alone."""
        return self.kinds.count("split")

    @property
    def num_batched(self) -> int:
        """Subsequences of short samples."""
        return self.kinds.count("batched")

    @property
    def num_hybrid(self) -> int:
        """Subsequences of the tail of a long sample and short ones."""
        return self.kinds.count("hybrid")

    @cached_property
    def kinds(self) -> list[str]:
        """Kind of each subsequence: split, batched, hybrid."""
        kinds = []
        for sequence in self.sequences:
            for parts in sequence.parts():
                cut = parts[0][0] > 0 or len(sequence.lengths) > 1
                kinds.append("batched" if not cut else "hybrid" if len(parts) > 1 else "split")
        return kinds


@dataclass(frozen=True, slots=True)
class StepPlanner:
    """Plans steps of samples for one replica of a run.

    Attributes:
        base: What the run's plan is for, without its sequences.
        longest: Tokens of the longest sample.
        slices: Subsequences that the plan cuts it into.
        alignment: Cuts of samples fall on multiples of this.
        searches: Whether other numbers of slices may be tried.
        room: Tokens of a subsequence that are tried on one rank, of a device at most, however short
            the longest sample is; 0 for those of a slice of the plan alone.
        interleaves: Whether a plan in the looped order may run sequences side by side instead, by
            interleaved Seq1F1B on the same stages.
        defers_weights: Whether gradients of weights may be put off to fill bubbles (zero bubble).
        quick: Whether the first packing that fits is taken, its activations placed by the policy;
            all is searched where none does.
        levels: Whether activations may have levels, by integer program.
    """

    base: Candidate
    longest: int
    slices: int
    alignment: int
    searches: bool
    room: int = 0
    interleaves: bool = False
    defers_weights: bool = False
    quick: bool = False
    levels: bool = True

    def corrected(self, correction: CostCorrection) -> StepPlanner:
        """Return the planner that plans with corrected seconds of compute."""
        workload = replace(self.base.workload, correction=correction)
        return replace(self, base=replace(self.base, workload=workload))

    def divided(self, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the samples of each replica, by their places among those of a step.

        Args:
            lengths: tokens of each sample of the step.

        Raises:
            ValueError: a replica would have none.
        """
        return divide_samples(
            self._cost.of_samples(lengths), replicas=self.base.data_parallel_degree
        )

    def least_s(self, lengths: Sequence[int]) -> float:
        """Return the seconds, about, that samples of these lengths take if all is retained.

        Without the update.
        """
        return min(packing.least_s for packing in self._packings(lengths))

    def seconds_of(self, lengths: Sequence[int]) -> tuple[float, ...]:
        """Return what whole samples take on one device, by which replicas are balanced."""
        return tuple(self._cost.of_samples(lengths))

    def in_sequences(self, packed: PackedSamples) -> StepPlan:
        """Return the fastest plan that fits, for samples that are packed already.

        Raises:
            MemoryError: none fits.
        """
        only = _Packing(packed, least_s=0.0, first=0)
        short: list[tuple[PackedSamples, EvaluatedCandidate]] = []
        alone = replace(self, quick=True)
        for bases in self._bases():
            found = [
                plan for base in bases for plan in alone._fitting([only], base=base, short=short)
            ]
            if found:
                return min(found, key=lambda plan: plan.step_s)
        shortfall = min(short, key=lambda one: one[1].short_bytes)[1].shortfall
        assert shortfall is not None, "what did not fit lacks something"
        raise MemoryError(shortfall.reason)

    def plan(self, lengths: Sequence[int]) -> StepPlan:
        """Return the fastest plan that fits, for samples of these lengths.

        Raises:
            MemoryError: none fits.
        """
        packings = self._packings(lengths)
        short: list[tuple[PackedSamples, EvaluatedCandidate]] = []
        for bases in self._bases():
            found = [
                plan for base in bases for plan in self._fitting(packings, base=base, short=short)
            ]
            if found:
                return self._with_best_schedule(min(found, key=lambda plan: plan.step_s))
        # What the run's plan was made for: its own cuts, one sequence after another.
        for bases in self._bases():
            found = self._fitting(self._as_planned(lengths), base=bases[-1], short=short)
            if found:
                return found[0]
        if self.quick:
            return replace(self, quick=False).plan(lengths)
        raise MemoryError(shortfall_text(lengths, short))

    def _with_best_schedule(self, plan: StepPlan) -> StepPlan:
        """Return a plan, with gradients of weights put off where that is faster by enough."""
        if not self.defers_weights or plan.evaluated.candidate.begun:
            return plan
        base = replace(self.base, schedule=_ZERO_BUBBLE)
        evaluated = assess(base.with_packed(plan.sequences))
        if evaluated.shortfall is not None:
            return plan
        other = StepPlan(plan.packed, simulate_candidate(evaluated))
        return other if other.step_s <= plan.step_s * WORTH_IT else plan

    def _fitting(
        self,
        packings: Sequence[_Packing],
        *,
        base: Candidate,
        short: list[tuple[PackedSamples, EvaluatedCandidate]],
    ) -> list[StepPlan]:
        """Return the first plans that fit; adds those that do not to `short`.

        A packing is passed over if one of no larger subsequences did not fit, or if what was found
        is faster than it can be.
        """
        found: list[StepPlan] = []
        pressed: list[tuple[float, PackedSamples, Candidate]] = []
        largest = None
        for packing in packings:
            fastest = min((plan.step_s for plan in found), default=None)
            retaining = sum(plan.evaluated.effective_policy == "retain" for plan in found)
            if retaining == _SIMULATED or len(found) == _MOST_SIMULATED or (self.quick and found):
                break
            if fastest is not None and fastest <= packing.least_s:
                break
            if largest is not None and packing.most_tokens >= largest:
                continue
            evaluated = assess(base.with_packed(packing.packed.sequences))
            if evaluated.shortfall is None:
                found.append(StepPlan(packing.packed, simulate_candidate(evaluated)))
            else:
                short.append((packing.packed, evaluated))
                largest = packing.most_tokens
            levels = self.levels and not self.quick and _chooses_levels(base)
            if levels and evaluated.effective_policy != "retain":
                policy_s = np.inf if evaluated.shortfall else found[-1].step_s
                pressed.append((policy_s, packing.packed, evaluated.candidate))
        return found + _with_levels(pressed)

    def _bases(self) -> Iterator[tuple[Candidate, ...]]:
        """Candidates of which the fastest is taken, until some fit.

        First those that may run sequences side by side, then those that run one after another.
        """
        if self.interleaves:
            yield replace(self.base, schedule=_INTERLEAVED, kv="retained"), self.base
            return
        yield (self.base,)
        if self.base.schedule != LOOPED and self.base.pipeline_parallel_degree > 1:
            yield (replace(self.base, schedule=LOOPED),)

    def _packings(self, lengths: Sequence[int]) -> list[_Packing]:
        """Return the samples packed in the ways that are tried, those that may be fastest first."""
        if self.room:
            packings = [self._packing(lengths, mesh) for mesh in self._meshes_of_one_rank]
            different = {packing.packed.sequences: packing for packing in reversed(packings)}
            return sorted(different.values(), key=lambda packing: packing.least_s)
        if not self.searches:
            return self._as_planned(lengths)
        rough = [self._sized(lengths, first) for first in self._first_slices(lengths)]
        if self.quick:
            return sorted(rough, key=lambda packing: packing.least_s)
        best = min(rough, key=lambda packing: packing.least_s)
        more = [
            *(
                self._sized(lengths, max(self._least_first, round(best.first * factor)))
                for factor in _HALF_STEPS
            ),
            *(
                self._sized(lengths, best.first, least=least, room=room)
                for least in _LEAST_SLICES
                for room in _ROOMS
                if (least, room) != (_LEAST_SLICES[0], _ROOMS[0])
            ),
            # Where memory is short, what just fits lies between those.
            *(
                self._sized(lengths, max(self._least_first, round(first * factor)), room=_ROOMS[1])
                for first in (packing.first for packing in rough if packing.first < best.first)
                for factor in (1.0, _HALF_STEPS[1])
            ),
        ]
        different = {packing.packed.sequences: packing for packing in (*rough, *more)}
        return sorted(different.values(), key=lambda packing: packing.least_s)

    def _as_planned(self, lengths: Sequence[int]) -> list[_Packing]:
        """Return the samples packed by the mesh of the run's plan, the only packing."""
        return [self._packing(lengths, self._mesh_as_planned)]

    @property
    def _mesh_as_planned(self) -> SliceMesh:
        return self._mesh_of_slices(self.slices)

    @property
    def _meshes_of_one_rank(self) -> Iterator[SliceMesh]:
        """Meshes of slices of equal tokens: that of the run's plan, and smaller and larger ones."""
        sizes = [self.room // 2]
        while sizes[-1] < min(self.longest, self._most_room):
            sizes.append(2 * sizes[-1])
        planned = self._mesh_as_planned
        yield from (planned, replace(planned, room=max(planned.room, self.room)))
        for size in sizes:
            mesh = self._mesh_of_slices(-(-self.longest // size))
            yield replace(mesh, room=max(mesh.room, size))

    def _mesh_of_slices(self, slices: int) -> SliceMesh:
        return mesh_of_slices(
            self._cost,
            longest=self.longest,
            slices=slices,
            balanced=self.base.pipeline_parallel_degree > 1,
            alignment=self.alignment,
        )

    def _first_slices(self, lengths: Sequence[int]) -> list[int]:
        """Tokens of a first slice that are tried: powers of two with enough subsequences."""
        ranks, cost = self.base.pipeline_parallel_degree, self._cost
        each_s = sum(cost.of_samples(lengths)) / ranks
        least = self._least_first
        doublings = int(np.log2(self._most_tokens / _PRICED / least))
        sizes = least * 2.0 ** np.arange(max(1, doublings + 1))
        seconds = np.array(cost.of_samples(sizes.astype(np.int64).tolist()))
        fits = (seconds <= each_s) & (seconds * _MOST_PER_RANK >= each_s)
        if fits.any():
            return [int(size) for size in sizes[fits]]
        # So much work that the largest makes more units than need be, or so little that none fits.
        return [int(sizes[-1]) if seconds[-1] <= each_s else least]

    def _sized(
        self,
        lengths: Sequence[int],
        first: int,
        *,
        least: float = _LEAST_SLICES[0],
        room: float = _ROOMS[0],
    ) -> _Packing:
        """Return the samples packed into subsequences that take as long as a first slice."""
        mesh = mesh_of_first_slice(
            self._cost,
            longest=self.longest,
            first=first,
            least=max(round(least * first), self.base.workload.sequence_parallel_degree),
            room=round(room * first),
            alignment=min(self.alignment, first),
        )
        return self._packing(lengths, mesh, first=first)

    def _packing(self, lengths: Sequence[int], mesh: SliceMesh, *, first: int = 0) -> _Packing:
        """Return the samples packed by a mesh."""
        packed = pack_samples(
            lengths,
            cost=self._cost,
            mesh=mesh,
            least_tokens=self.base.workload.sequence_parallel_degree,
            multiple=self.multiple,
        )
        seconds = subsequence_seconds(packed, cost=self._cost)
        ranks = self.base.pipeline_parallel_degree
        filling_s = (ranks - 1) / self.base.virtual_stages * seconds.max()
        least_s = float(seconds.sum() + filling_s) / ranks
        return _Packing(packed, least_s, first)

    @property
    def multiple(self) -> int:
        """Multiple of tokens that subsequences are padded to.

        A CPU's products in half precision compile code for every number of rows, MiBs of it that
        are never freed: without padding 600 random lengths took 1.4 GiB and three times as long as
        with it, in a model of 128 hidden units.
        """
        workload = self.base.workload
        narrow = workload.element_bytes < ACCUMULATION_BYTES
        on_cpu = workload.hardware.device.kind == "cpu"
        return ROW_ALIGNMENT if narrow and on_cpu else 1

    @property
    def _most_room(self) -> int:
        """Tokens of a subsequence that are tried on one rank at most, of all its devices."""
        return self.room * self.base.workload.sequence_parallel_degree

    @property
    def _least_first(self) -> int:
        """Tokens of the smallest first slice that is tried."""
        return max(LEAST_TOKENS, self.base.workload.sequence_parallel_degree)

    @property
    def _most_tokens(self) -> int:
        """Tokens of the largest subsequence whose cost may be asked for."""
        return _PRICED * max(2 * self.longest, _SHORT_SAMPLES)

    @property
    def _cost(self) -> SampleCost:
        """Cost of parts of samples."""
        return sample_cost(self.base.workload, most_tokens=self._most_tokens)


@dataclass(frozen=True, slots=True)
class _Packing:
    """A way to pack a step.

    Attributes:
        packed: The samples.
        least_s: Seconds that a pipeline takes for it, about, if everything is retained.
        first: Tokens of a first slice that it was made for.
    """

    packed: PackedSamples
    least_s: float
    first: int

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest subsequence."""
        return max(max(sequence.lengths) for sequence in self.packed.sequences)


def _chooses_levels(base: Candidate) -> bool:
    """Return whether its activations may be placed unit by unit, as is fastest."""
    return base.policy == "hybrid" and base.offload_ratio is None


def _with_levels(pressed: Sequence[tuple[float, PackedSamples, Candidate]]) -> list[StepPlan]:
    """Return plans whose activations have levels, of the packings that are fastest without.

    Args:
        pressed: seconds by the policy, samples and candidate of packings of which not everything
            can be retained.
    """
    found: list[StepPlan] = []
    for packed, candidate in _quickest_first(pressed):
        fastest_s = min((plan.step_s for plan in found), default=np.inf)
        if least_pipeline_s(candidate) >= fastest_s:
            continue
        placed = fastest_levels(candidate)
        if placed is not None:
            found.append(StepPlan(packed, placed))
        if len(found) == _LEVELLED:
            break
    return found


def _quickest_first(
    pressed: Sequence[tuple[float, PackedSamples, Candidate]],
) -> list[tuple[PackedSamples, Candidate]]:
    """Return packings by their seconds; of those that the policy cannot place, recomputed whole."""
    seconds: list[float] = []
    for policy_s, _, candidate in pressed:
        everything = everything_recomputed(candidate) if np.isinf(policy_s) else None
        seconds.append(policy_s if everything is None else everything.step_s)
    order = sorted(range(len(pressed)), key=seconds.__getitem__)
    return [pressed[place][1:] for place in order]


def step_planner(plan: ExecutionPlan, *, background_saves: bool = False) -> StepPlanner:
    """Return what plans the steps of a run of samples.

    Args:
        plan: of the run, for its longest samples.
        background_saves: whether checkpoints are copied in memory and written while it goes on.
    """
    return planner_of_candidate(
        plan_candidate(plan), run=plan.run, background_saves=background_saves
    )


def planner_of_candidate(
    candidate: Candidate, *, run: Mapping[str, Any], background_saves: bool = False
) -> StepPlanner:
    """Return what plans the steps of a run of samples with the degrees of a candidate.

    Args:
        candidate: a step of the longest samples, with everything decided.
        run: the keys of the run that its plan rests on.
        background_saves: whether checkpoints are copied in memory and written while it goes on.
    """
    workload = candidate.workload
    kind = workload.hardware.device.kind
    shards_weights = (
        workload.sequence_parallel == "megatron" and workload.sequence_parallel_degree > 1
    )
    # Units of different sequences are not cut over ranks; the order without it is run.
    schedule = candidate.order
    is_open = (
        run["parallel"]["schedule"] == "auto"
        and candidate.pipeline_parallel_degree > 1
        and candidate.state == ON_DEVICE
    )
    # Where it is open every step decides whether gradients of weights are put off.
    defers_weights = (
        is_open and candidate.virtual_stages == 1 and schedule in ("sppo", _ZERO_BUBBLE)
    )
    schedule = "sppo" if defers_weights else schedule
    policy, ratio = run["activations"]["policy"], run["activations"]["offload_ratio"]
    sequence = run["sequence"]
    free = sequence["num_subsequences"] == "auto" and schedule not in WHOLE_SEQUENCES
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
        longest=sum(candidate.lengths),
        slices=len(candidate.lengths),
        alignment=sequence["alignment"],
        searches=free and candidate.pipeline_parallel_degree > 1,
        room=SUBSEQUENCE_TOKENS[kind][1] if free and candidate.pipeline_parallel_degree == 1 else 0,
        interleaves=is_open and schedule == LOOPED and candidate.virtual_stages > 1,
        defers_weights=defers_weights,
    )
