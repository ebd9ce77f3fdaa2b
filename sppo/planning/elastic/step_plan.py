"""Plan of one step of samples: sequences, program, placements, and predictions.

A run of samples has an execution plan for its longest samples, which fixes degrees, schedule and
policy and fits in memory. A step is planned from this plan once its samples are known. The samples
are packed into subsequences in several ways. For the packings of least estimated time, the policy
places activations as for any candidate; the packing that fits and simulates fastest is taken. In
a pipeline its weight gradients are then deferred if that simulates faster.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sppo.activations.subsequence_placement import SubsequencePlacement
from sppo.cost.candidate import Candidate
from sppo.cost.layer import CostCorrection
from sppo.cost.packed_sequence import PackedSequence
from sppo.cost.stage_cost import executed_flops
from sppo.cost.state_tiers import ON_DEVICE
from sppo.planning.elastic.levels import fastest_levels
from sppo.planning.elastic.packing import PADDING, PackedSamples, divide_samples
from sppo.planning.elastic.packing_search import PackingSearch
from sppo.planning.elastic.sample_shortfall import shortfall_text
from sppo.planning.make_plan import stage_plans
from sppo.planning.plan import ExecutionPlan
from sppo.planning.search.choices import SUBSEQUENCE_TOKENS
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.evaluation import WORTH_IT, evaluate_candidate
from sppo.schedule.orders.names import LOOPED, WHOLE_SEQUENCES
from sppo.schedule.schedule import Schedule

_INTERLEAVED = "interleaved_seq1f1b"
_ZERO_BUBBLE = "seq_zb_h1"
_SIMULATED = 3
"""Number of packings that fit with everything retained after which the search ends."""
_MOST_SIMULATED = 6
"""Number of packings that fit, with any placement, after which the search ends."""
_LEVELLED = 3
"""Number of packings whose activations are also placed by levels."""


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Packed samples of one replica in one step, and the candidate that runs them.

    Attributes:
        packed: Packed samples.
        evaluated: Chosen candidate.
    """

    packed: PackedSamples
    evaluated: EvaluatedCandidate

    @property
    def num_samples(self) -> int:
        """Number of samples of the step, without padding."""
        return sum(index != PADDING for samples in self.packed.samples for index in samples)

    @property
    def tokens(self) -> int:
        """Number of tokens of all sequences, including padding."""
        return sum(sequence.tokens for sequence in self.sequences)

    @property
    def sequences(self) -> tuple[PackedSequence, ...]:
        """Sequences that the samples are packed into."""
        return self.packed.sequences

    @cached_property
    def program(self) -> Schedule:
        """Program of the step."""
        return self.evaluated.executed_program()

    @cached_property
    def digest(self) -> str:
        """Digest of program, packing and placements, which must be equal on all ranks."""
        content = repr((self.program.digest(), self.packed.samples, self.placements))
        return hashlib.sha256(content.encode()).hexdigest()

    @cached_property
    def placements(self) -> tuple[tuple[tuple[SubsequencePlacement, ...], ...], ...]:
        """Placement of each subsequence, [stages][sequences][subsequences]."""
        sequences = self.evaluated.candidate.distinct_sequences
        return tuple(
            tuple(stage.subsequences[own] for own in sequences)
            for stage in stage_plans(self.evaluated)
        )

    @property
    def step_s(self) -> float:
        """Simulated seconds of the step, including the update."""
        return self.evaluated.step_s

    @property
    def executed_flops(self) -> int:
        """FLOPs that the step executes, including recomputation."""
        return executed_flops(self.evaluated.candidate, self.evaluated.placement)

    @property
    def bubble_fraction(self) -> float:
        """Simulated idle share of all pipeline ranks."""
        return self.evaluated.simulated.bubble_fraction

    @property
    def device_peak_bytes(self) -> int:
        """Simulated memory of the fullest device."""
        return max(self.evaluated.simulated_bytes)

    @cached_property
    def kinds(self) -> Counter[str]:
        """Number of subsequences by kind.

        "split" is one slice of a long sample, "batched" are short samples alone, and "hybrid" is
        the tail of a long sample beside short samples.
        """
        kinds: Counter[str] = Counter()
        for sequence in self.sequences:
            for parts in sequence.parts():
                cut = parts[0][0] > 0 or len(sequence.lengths) > 1
                kinds["batched" if not cut else "hybrid" if len(parts) > 1 else "split"] += 1
        return kinds


@dataclass(frozen=True, slots=True)
class StepPlanner:
    """Planner of steps of samples for one replica of a run.

    Attributes:
        packing_search: Search for ways to pack samples, with the candidate of the run's plan.
        interleaves: Whether a plan in the looped order may instead overlap sequences, by
            interleaved Seq1F1B on the same stages.
        defers_weights: Whether weight gradients may be deferred to fill bubbles (zero bubble).
        quick: Whether to take the first packing that fits, with activations placed by the policy.
            If none fits, everything is searched.
        levels: Whether activations may have levels chosen by levels.
    """

    packing_search: PackingSearch
    interleaves: bool = False
    defers_weights: bool = False
    quick: bool = False
    levels: bool = True

    @property
    def base(self) -> Candidate:
        """Candidate of the run's plan, whose sequences are replaced in each step."""
        return self.packing_search.base

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.packing_search.longest

    def with_base(self, base: Candidate) -> StepPlanner:
        """Return the planner for another candidate."""
        return replace(self, packing_search=replace(self.packing_search, base=base))

    def corrected(self, correction: CostCorrection) -> StepPlanner:
        """Return the planner with corrected seconds of compute."""
        workload = replace(self.base.workload, correction=correction)
        return self.with_base(replace(self.base, workload=workload))

    def divided(self, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the samples of each replica, as indices among the samples of the step.

        Args:
            lengths: Tokens of each sample of the step.

        Raises:
            ValueError: There are fewer samples than replicas.
        """
        return divide_samples(self.seconds_of(lengths), replicas=self.base.data_parallel_degree)

    def least_s(self, lengths: Sequence[int]) -> float:
        """Return about how long a step of these samples takes with everything retained, in seconds.

        Without the update.
        """
        packings = self.packing_search.packings(lengths, quick=self.quick)
        return min(packing.least_s for packing in packings)

    def seconds_of(self, lengths: Sequence[int]) -> tuple[float, ...]:
        """Return the seconds of each whole sample on one device, by which replicas are balanced."""
        return tuple(self.packing_search.cost.of_samples(lengths))

    def plan_packed(self, packed: PackedSamples) -> StepPlan:
        """Return the fastest plan that fits, for samples that are already packed.

        Raises:
            MemoryError: No plan fits.
        """
        short: list[EvaluatedCandidate] = []
        found = replace(self, quick=True)._fastest([packed], short=short)
        if found is None:
            lengths = [tokens for sequence in packed.sequences for tokens in sequence.samples]
            raise MemoryError(shortfall_text(lengths, short))
        return found

    def plan(self, lengths: Sequence[int]) -> StepPlan:
        """Return the fastest plan that fits, for samples of these lengths.

        Raises:
            MemoryError: No plan fits.
        """
        packings = self.packing_search.packings(lengths, quick=self.quick)
        short: list[EvaluatedCandidate] = []
        fastest = self._fastest(packings, short=short)
        if fastest is not None:
            return self._with_best_schedule(fastest)
        # Fall back to the cuts of the run's plan, one sequence after another.
        planned = self.packing_search.as_planned(lengths)
        for bases in self._bases():
            found = self._fitting(planned, base=bases[-1], short=short)
            if found:
                return found[0]
        if self.quick:
            return replace(self, quick=False).plan(lengths)
        raise MemoryError(shortfall_text(lengths, short))

    def _fastest(
        self, packings: Sequence[PackedSamples], *, short: list[EvaluatedCandidate]
    ) -> StepPlan | None:
        """Return the fastest plan of the first bases with one; append what lacks memory."""
        for bases in self._bases():
            found = [
                plan for base in bases for plan in self._fitting(packings, base=base, short=short)
            ]
            if found:
                return min(found, key=lambda plan: plan.step_s)
        return None

    def _with_best_schedule(self, plan: StepPlan) -> StepPlan:
        """Return `plan`, or its zero-bubble variant if deferring weight gradients is faster."""
        if not self.defers_weights or plan.evaluated.candidate.forwards_before_backward:
            return plan
        base = replace(self.base, schedule=_ZERO_BUBBLE)
        evaluated = evaluate_candidate(base.with_packed(plan.sequences))
        if evaluated.shortfall is not None:
            return plan
        other = StepPlan(plan.packed, evaluated)
        return other if other.step_s <= plan.step_s * WORTH_IT else plan

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
            levels = self.levels and not self.quick and _chooses_levels(base)
            if levels and evaluated.effective_policy != "retain":
                pressed.append((packing, evaluated.candidate))
        return found + _with_levels(pressed)

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


def _chooses_levels(base: Candidate) -> bool:
    """Return whether the run leaves open how the activations of each unit are placed."""
    return base.policy == "hybrid" and base.offload_ratio is None


def _with_levels(pressed: Sequence[tuple[PackedSamples, Candidate]]) -> list[StepPlan]:
    """Return plans with levels for the first packings for which there are any.

    Args:
        pressed: Packed samples, and candidate, of packings that do not fit with everything
            retained, in the order of their estimated time.
    """
    found: list[StepPlan] = []
    for packed, candidate in pressed:
        placed = fastest_levels(candidate)
        if placed is not None:
            found.append(StepPlan(packed, placed))
        if len(found) == _LEVELLED:
            break
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
    kind = workload.hardware.device.kind
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
    free = sequence["num_subsequences"] == "auto" and schedule not in WHOLE_SEQUENCES
    packing_search = PackingSearch(
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
        tries_sizes=free and candidate.pipeline_parallel_degree > 1,
        room=SUBSEQUENCE_TOKENS[kind][1] if free and candidate.pipeline_parallel_degree == 1 else 0,
    )
    return StepPlanner(
        packing_search,
        interleaves=is_open and schedule == LOOPED and candidate.virtual_stages > 1,
        defers_weights=defers_weights,
    )
