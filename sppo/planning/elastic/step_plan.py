"""The plan of one step of samples: sequences, program, placements, and what comes of them.

A run of samples has a plan for its longest ones, which chose degrees, schedule and policy and fits
in the memory there is. A step is planned from it when its samples are known: they are packed for a
few sizes of subsequences, the policy places activations of each packing as it does those of any
candidate, and the fastest that fits, as simulated, is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sppo.activations.placement import SubsequencePlacement
from sppo.activations.tensor_classes import ATTENTION, LINEAR
from sppo.cost.candidate import Candidate
from sppo.cost.flops import executed_step_flops
from sppo.cost.packed_sequence import PackedSequence
from sppo.planning.candidate_program import candidate_program
from sppo.planning.elastic.packing import PADDING, PackedSamples, mesh_of, pack_samples
from sppo.planning.elastic.replicas import divide_samples
from sppo.planning.elastic.sample_cost import sample_cost
from sppo.planning.make_plan import compute_seconds, stage_plans
from sppo.planning.plan import ExecutionPlan
from sppo.planning.plan_program import plan_candidate
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate, assess
from sppo.planning.search.simulated_candidate import simulate_candidate, simulated_device_bytes
from sppo.schedule.actions import Schedule
from sppo.schedule.generators import LOOPED, WHOLE_SEQUENCES
from sppo.units import format_bytes

LEAST_TOKENS = 256
"""Subsequences are not cut shorter than this to fill a pipeline."""
_SLICES = (0.5, 1.0, 2.0, 4.0)
"""Numbers of slices of the longest sample that are tried in a pipeline, over that of the plan."""


@dataclass(frozen=True, eq=False)
class StepPlan:
    """What one replica runs in one step.

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
        """What the samples are packed into."""
        return self.packed.sequences

    @cached_property
    def program(self) -> Schedule:
        """The program of the step."""
        evaluated = self.evaluated
        return evaluated.program or candidate_program(evaluated.candidate, costs=evaluated.costs)

    @cached_property
    def placements(self) -> tuple[tuple[tuple[SubsequencePlacement, ...], ...], ...]:
        """What each stage does with each subsequence of each sequence."""
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
        return self._kinds.count("split")

    @property
    def num_batched(self) -> int:
        """Subsequences of short samples."""
        return self._kinds.count("batched")

    @property
    def num_hybrid(self) -> int:
        """Subsequences of the tail of a long sample and short ones."""
        return self._kinds.count("hybrid")

    @cached_property
    def _kinds(self) -> list[str]:
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
    """

    base: Candidate
    longest: int
    slices: int
    alignment: int
    searches: bool

    def divided(self, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the samples of each replica, by their places among those of a step.

        Args:
            lengths: tokens of each sample of the step.

        Raises:
            ValueError: a replica would have none.
        """
        cost = sample_cost(self.base.workload, most_tokens=-(-self.longest // self.slices))
        return divide_samples(cost.of_samples(lengths), replicas=self.base.data_parallel_degree)

    def plan(self, lengths: Sequence[int]) -> StepPlan:
        """Return the fastest plan that fits, for samples of these lengths.

        Raises:
            MemoryError: none fits.
        """
        found: list[StepPlan] = []
        short: list[EvaluatedCandidate] = []
        for base in self._bases():
            for slices in self._slices():
                packed = self._packed(lengths, slices)
                evaluated = assess(base.with_packed(packed.sequences))
                if evaluated.shortfall is not None:
                    short.append(evaluated)
                    continue
                found.append(StepPlan(packed, simulate_candidate(evaluated)))
            if found:
                return min(found, key=lambda plan: plan.step_s)
        raise MemoryError(_too_large(lengths, short))

    def _bases(self) -> Iterator[Candidate]:
        """The candidates to try until one fits: sequences side by side, then one after another."""
        yield self.base
        if self.base.schedule != LOOPED and self.base.pipeline_parallel_degree > 1:
            yield replace(self.base, schedule=LOOPED)

    def _slices(self) -> list[int]:
        """Numbers of slices of the longest sample, as tried."""
        if not self.searches:
            return [self.slices]
        least = max(LEAST_TOKENS, self.base.workload.sequence_parallel_degree)
        counts = {max(1, round(self.slices * factor)) for factor in _SLICES}
        return [n for n in sorted(counts) if self.longest // n >= least] or [self.slices]

    def _packed(self, lengths: Sequence[int], slices: int) -> PackedSamples:
        """Return the samples, cut as if the longest had so many slices."""
        candidate = self.base
        cost = sample_cost(candidate.workload, most_tokens=2 * -(-self.longest // slices))
        mesh = mesh_of(
            cost,
            longest=self.longest,
            slices=slices,
            balanced=candidate.pipeline_parallel_degree > 1,
            alignment=self.alignment,
        )
        least_tokens = candidate.workload.sequence_parallel_degree
        return pack_samples(lengths, cost=cost, mesh=mesh, least_tokens=least_tokens)


def step_planner(plan: ExecutionPlan) -> StepPlanner:
    """Return what plans the steps of a run of samples.

    Args:
        plan: of the run, for its longest samples.
    """
    candidate = plan_candidate(plan)
    # Units of different sequences are not cut over ranks; that order without it is the SPPO one.
    schedule = "sppo" if candidate.schedule == "sppo_msp" else candidate.schedule
    run = plan.run
    policy, ratio = run["activations"]["policy"], run["activations"]["offload_ratio"]
    sequence = run["sequence"]
    free = sequence["num_subsequences"] == "auto" and schedule not in WHOLE_SEQUENCES
    return StepPlanner(
        replace(
            candidate,
            schedule=schedule,
            policy="hybrid" if policy == "auto" else policy,
            offload_ratio=None if ratio == "auto" else ratio,
        ),
        longest=plan.boundaries[-1],
        slices=len(plan.lengths),
        alignment=sequence["alignment"],
        searches=free and candidate.pipeline_parallel_degree > 1,
    )


def _too_large(lengths: Sequence[int], short: Sequence[EvaluatedCandidate]) -> str:
    """Say what a step that does not fit lacks."""
    least = min(short, key=lambda evaluated: evaluated.short_bytes)
    shortfall = least.shortfall
    assert shortfall is not None, "only called where nothing fits"
    return (
        f"a step of {len(lengths)} samples, the longest of {max(lengths)} tokens, needs "
        f"{format_bytes(shortfall.needed_bytes)} (most of it "
        f"{shortfall.bucket.replace('_', ' ')}: {format_bytes(shortfall.bucket_bytes)}), and "
        f"{format_bytes(shortfall.available_bytes)} may be used: shorten sequence.length, or "
        "raise sequence.num_subsequences"
    )
