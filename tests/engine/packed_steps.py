"""Steps of samples packed into sequences, and the same samples each by itself, with their data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import torch

from sppo.activations.placement import ActivationPlacement
from sppo.cost.candidate import Candidate
from sppo.cost.layer import Workload
from sppo.cost.packed_sequence import PackedSequence
from sppo.engine.step_programs import PlannedStep
from sppo.engine.unit import SequenceData
from sppo.hardware.presets import PRESETS
from sppo.kernels.labels import IGNORED_LABEL
from sppo.planning.elastic.levels import LEVELS, OFFLOADING_LEVELS, Level, _level_choice
from sppo.planning.elastic.pacing import can_be_paced
from sppo.planning.elastic.packing import PADDING, PackedSamples
from sppo.planning.elastic.packing_search import PackingSearch
from sppo.planning.elastic.step_plan import StepPlan, StepPlanner
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.evaluation import evaluate_candidate, evaluate_placement
from sppo.planning.search.simulated_candidate import simulate_candidate
from tests.engine.models import random_sequence
from tests.schedule.pacing import forwards_between


@dataclass(frozen=True)
class PackedStep:
    """What one replica trains on in a step.

    Attributes:
        plan: Of its samples.
        seed: Of the tokens and labels of its first sample; the next ones follow.
        counted: The only sample whose labels count; None where all do.
        changed: Whether all other samples have other tokens.
    """

    plan: StepPlan
    seed: int = 0
    counted: int | None = None
    changed: bool = False

    @property
    def packed(self) -> PackedSamples:
        """Its samples, by their places in the step."""
        return self.plan.packed

    @property
    def planned(self) -> PlannedStep:
        """What the engine follows."""
        return PlannedStep(self.plan.program, self.plan.placements)

    def without_offloading(self) -> PackedStep:
        """Return the same step, where what leaves the device stays there."""
        evaluated = self.plan.evaluated
        given = evaluated.placement
        placement = ActivationPlacement(
            given.retained + given.offloaded, np.zeros_like(given.offloaded), given.recomputed
        )
        kept = simulate_candidate(evaluate_placement(evaluated.candidate, placement))
        return replace(self, plan=StepPlan(self.packed, kept))

    @property
    def cuts(self):
        """Boundaries of the subsequences of each sequence."""
        return [sequence.boundaries for sequence in self.packed.sequences]

    def samples(self, model):
        """Return every sample as a sequence of its own."""
        return list(self._samples(model).values())

    def sequences(self, model):
        """Return the samples as they are packed."""
        samples = self._samples(model)
        return [
            joined(
                padding(tokens) if index == PADDING else samples[index]
                for index, tokens in zip(indices, sequence.samples, strict=True)
            )
            for indices, sequence in zip(self.packed.samples, self.packed.sequences, strict=True)
        ]

    def _samples(self, model):
        return {
            index: self._sample(model, index, tokens)
            for indices, sequence in zip(self.packed.samples, self.packed.sequences, strict=True)
            for index, tokens in zip(indices, sequence.samples, strict=True)
            if index != PADDING
        }

    def _sample(self, model, index, tokens):
        sample = random_sequence(model, tokens, seed=self.seed + index)
        if self.counted in (None, index):
            return sample
        ids = (sample.tokens_S + 1) % model.vocab_size if self.changed else sample.tokens_S
        return SequenceData(ids, torch.full_like(sample.labels_S, IGNORED_LABEL))


def joined(samples: Iterable[SequenceData]) -> SequenceData:
    """Return samples side by side in one sequence, each a document of its own."""
    samples = list(samples)
    starts = torch.tensor([0, *(len(data.tokens_S) for data in samples[:-1])]).cumsum(0)
    return SequenceData(
        torch.cat([data.tokens_S for data in samples]),
        torch.cat([data.labels_S for data in samples]),
        tuple(starts.tolist()),
    )


def padding(tokens: int) -> SequenceData:
    """Return tokens that belong to no sample."""
    nothing = torch.zeros(tokens, dtype=torch.int64)
    return SequenceData(nothing, nothing.new_full((tokens,), IGNORED_LABEL))


def base_candidate(model, *, degrees=(1, 1, 1), sequence_parallel="ulysses", **options):
    """Return what a run of samples is planned for, on a machine with room for everything.

    Args:
        model: the shape.
        degrees: dp, pp, sp.
        sequence_parallel: ulysses or megatron.
        options: further attributes of the candidate.
    """
    data, pipeline, sequence = degrees
    workload = Workload(
        model,
        PRESETS["a100-80g"],
        dtype="fp32",
        sequence_parallel_degree=sequence,
        sequence_parallel=sequence_parallel,
    )
    return Candidate(
        workload,
        (1,),  # every step has sequences of its own
        pipeline_parallel_degree=pipeline,
        data_parallel_degree=data,
        **options,
    )


def planned_step(
    base: Candidate,
    lengths: Sequence[int],
    *,
    longest: int | None = None,
    slices: int,
    alignment: int = 1,
    seed: int = 0,
) -> tuple[PackedStep, ...]:
    """Return the step of each replica, as a run plans it.

    Args:
        base: of the run.
        lengths: tokens of each sample of the step.
        longest: tokens of the longest sample of the run; None: of the step.
        slices: into which that one is cut.
        alignment: cuts of samples fall on multiples of this.
        seed: of the first sample.
    """
    search = PackingSearch(base, longest or max(lengths), slices, alignment, tries_sizes=False)
    planner = StepPlanner(search)
    steps = []
    for own in planner.divided(lengths):
        plan = planner.plan([lengths[index] for index in own])
        steps.append(PackedStep(plan, seed))
        seed += len(own)
    return tuple(steps)


def hand_packed_step(
    base: Candidate,
    sequences: Sequence[PackedSequence],
    *,
    seed: int = 0,
    mixed: bool = False,
    paced: float | None = None,
) -> PackedStep:
    """Return a step of sequences that were packed in any way, planned as those of a run are.

    Args:
        base: of the run.
        sequences: what the samples are packed into.
        seed: of the first sample.
        mixed: whether every unit has a level of its own instead of what the policy decides.
        paced: share of the forwards that the schedule begins ahead; None lets it.
    """
    places = iter(range(sum(len(sequence.samples) for sequence in sequences)))
    indices = tuple(tuple(next(places) for _ in one.samples) for one in sequences)
    packed = PackedSamples(tuple(sequences), indices)
    candidate = base.with_packed(packed.sequences)
    if paced is not None and can_be_paced(candidate):
        counts = forwards_between(
            candidate.schedule,
            num_ranks=candidate.pipeline_parallel_degree,
            lengths=candidate.sequence_lengths,
            share=paced,
        )
        candidate = replace(candidate, forwards_before_backward=counts)
    evaluated = _with_mixed_levels(candidate, seed=seed) if mixed else evaluate_candidate(candidate)
    return PackedStep(StepPlan(packed, simulate_candidate(evaluated)), seed)


def _with_mixed_levels(candidate: Candidate, *, seed: int) -> EvaluatedCandidate:
    """Return the candidate with any level for each unit of each stage, cut at any row."""
    levels = list(LEVELS if candidate.kv == "recomputed" else OFFLOADING_LEVELS)
    if candidate.workload.sequence_parallel == "ulysses":
        levels += [Level(*shares) for shares in ((0.5, 0.5), (0.5, 1.0), (0.0, 0.3), (0.7, 0.0))]
    with mock.patch("sppo.planning.elastic.levels.ROW_ALIGNMENT", 1):
        choice = _level_choice(candidate, levels=levels, counts_shares=False)
    shape = candidate.num_stages, len(candidate.lengths)
    return choice.evaluated(np.random.default_rng(seed).integers(0, len(levels), shape))
