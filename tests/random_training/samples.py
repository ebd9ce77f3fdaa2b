"""Trainings on samples: the samples of each step, planned as in a run, and found naively."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from sppo.activations.placement import ActivationPlacement
from sppo.activations.tensor_classes import ATTENTION, LINEAR
from sppo.config.model import ModelConfig
from sppo.cost.candidate import Candidate
from sppo.cost.trainable import EVERYTHING, Trainable
from sppo.cost.workload import Workload
from sppo.data.order import SequenceOrder
from sppo.data.sample_rows import TrainingData
from sppo.data.samples.sample_table import SampleTable, sample_table
from sppo.engine.step_programs import PlannedStep
from sppo.engine.unit import SequenceData
from sppo.hardware.presets import PRESETS
from sppo.kernels.labels import IGNORED_LABEL
from sppo.planning.elastic.levels import level_choice
from sppo.planning.elastic.pacing import can_be_paced
from sppo.planning.elastic.packing import PADDING
from sppo.planning.elastic.step_plan import StepPlan
from sppo.planning.elastic.step_planner import StepPlanner
from sppo.planning.partition import boundaries_by_length, lengths_of
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.evaluation import evaluate_candidate
from tests.random_training.case import Case, Leg, Samples
from tests.schedule.pacing import forwards_between

ReplicaStep = tuple[list[SequenceData], list[tuple[int, ...]], PlannedStep]
"""Sequences of a replica, their boundaries, and what the engine follows."""


def samples_alone(case: Case, leg: int, step: int) -> list[SequenceData]:
    """The samples of a step, each by itself, by going through all steps before it."""
    samples = _samples(case)
    pieces = [
        (start + skipped, min(samples.longest, end - 1 - start - skipped))
        for start, end in zip(_offsets(samples), _offsets(samples)[1:], strict=False)
        for skipped in range(0, end - 1 - start, samples.longest)
        if samples.longer == "cut" or end - 1 - start <= samples.longest
    ]
    order = SequenceOrder(len(pieces), seed=case.seed, shuffle=True)
    position, own = 0, []
    for _ in range(sum(before.steps for before in case.legs[:leg]) + step + 1):
        position, own = position + len(own), []
        while not own or _has_room(samples, [length for _, length in own]):
            piece = pieces[int(order.sequence_indices(position + len(own), 1)[0])]
            if samples.tokens_per_step and own:
                tokens = sum(length for _, length in own) + piece[1]
                if tokens > samples.tokens_per_step:
                    break
            own.append(piece)
    return [_sample(case, start, length) for start, length in own]


def _has_room(samples: Samples, lengths: Sequence[int]) -> bool:
    if samples.samples_per_step:
        return len(lengths) < samples.samples_per_step
    return sum(lengths) < samples.tokens_per_step


def planned_samples(case: Case, leg: int, step: int) -> list[ReplicaStep]:
    """The step of each replica, as a run that was resumed at this leg finds and plans it."""
    samples, how = _samples(case), case.legs[leg]
    data = _document_samples(case)
    first = sum(before.steps for before in case.legs[:leg])
    consumed = 0
    for _ in range(first + step):
        consumed += len(data.step_samples(consumed))
    own = data.step_samples(consumed)
    base = _base(how, case)
    cuts = boundaries_by_length(samples.longest, num_subsequences=how.slices)
    base = replace(base, lengths=lengths_of(cuts))
    planner = StepPlanner(base, alignment=1, tries_sizes=False)
    found = []
    for replica in planner.divided(data.lengths(own)):
        plan = _plan(planner, data.lengths([own[index] for index in replica]), samples, how.tier)
        table = data.table
        read = [
            _sample(case, int(table.starts[own[n]]), int(table.lengths[own[n]])) for n in replica
        ]
        sequences = [
            joined(
                padding(tokens) if index == PADDING else read[index]
                for index, tokens in zip(indices, sequence.samples, strict=True)
            )
            for indices, sequence in zip(plan.packed.samples, plan.sequences, strict=True)
        ]
        cuts = [sequence.boundaries for sequence in plan.sequences]
        found.append((sequences, cuts, PlannedStep(plan.program, plan.placements)))
    return found


@lru_cache(maxsize=64)
def _plan(planner: StepPlanner, lengths: tuple[int, ...], samples: Samples, tier: str) -> StepPlan:
    """Plan a step once for all ranks.

    Args:
        planner: of the run.
        lengths: tokens of each sample of a replica.
        samples: say whether levels and pace are others than planned.
        tier: that levels may offload to, if any.
    """
    plan = planner.plan(lengths)
    candidate = plan.evaluated.candidate
    if samples.pace is not None and can_be_paced(candidate):
        counts = forwards_between(
            candidate.schedule,
            num_ranks=candidate.pipeline_parallel_degree,
            lengths=candidate.sequence_lengths,
            share=samples.pace,
        )
        candidate = replace(candidate, forwards_before_backward=counts)
    if samples.mixed:
        evaluated = _with_mixed_levels(candidate, offloads=bool(tier))
    elif candidate is plan.evaluated.candidate:
        return plan
    else:
        evaluated = evaluate_candidate(candidate)
    return StepPlan(plan.packed, evaluated)


def _with_mixed_levels(candidate: Candidate, *, offloads: bool) -> EvaluatedCandidate:
    """The candidate with any level for each unit of each stage, cut at any row."""
    choice = level_choice(candidate, offloads=offloads)
    levels = [*choice.placements]
    if offloads and candidate.workload.sequence_parallel == "ulysses":
        shares = ((0.5, 0.5), (0.5, 1.0), (0.0, 0.3), (0.7, 0.0))
        levels += [_partly_recomputed(levels[0], *one) for one in shares]
    shape = candidate.num_stages, len(candidate.lengths)
    choice = replace(choice, placements=tuple(levels))
    return choice.evaluated(np.random.default_rng(0).integers(0, len(levels), shape))


def _partly_recomputed(
    retaining: ActivationPlacement, attention: float, linear: float
) -> ActivationPlacement:
    """The placement with shares of the rows of two tensor classes recomputed."""
    recomputed = np.zeros_like(retaining.retained)
    for index, share in ((ATTENTION, attention), (LINEAR, linear)):
        recomputed[:, :, index] = np.ceil(share * retaining.retained[:, :, index])
    return ActivationPlacement(retaining.retained - recomputed, retaining.offloaded, recomputed)


def _base(leg: Leg, case: Case) -> Candidate:
    """What the steps of a leg are planned for."""
    options: dict[str, Any] = {"policy": leg.policy}
    if leg.tier:
        everything = leg.ratio == 1.0 and leg.last_too
        options = {"policy": "offload_all"} if everything else {"offload_ratio": leg.ratio}
    kv = "offloaded" if leg.kv_offloaded else "recomputed" if leg.kv_recomputed else "retained"
    return base_candidate(
        case.model.config(),
        trainable=case.trainable,
        degrees=(leg.dp, leg.pp, leg.sp),
        sequence_parallel=leg.sequence_parallel,
        schedule=leg.schedule,
        virtual_stages=leg.virtual,
        input_every=leg.input_every,
        zero=leg.zero,
        kv=kv,
        state=leg.tiers,
        **options,
    )


def _document_samples(case: Case) -> TrainingData:
    samples = _samples(case)
    table: SampleTable = sample_table(
        np.array(_offsets(samples), dtype=np.int64), length=samples.longest, longer=samples.longer
    )
    order = SequenceOrder(table.num_samples, seed=case.seed, shuffle=True)
    return TrainingData(
        table,
        order,
        (),  # tokens come from the case
        samples_per_step=samples.samples_per_step or None,
        tokens_per_step=samples.tokens_per_step or None,
    )


def _samples(case: Case) -> Samples:
    assert case.samples is not None, "only asked for where a case trains on samples"
    return case.samples


def _offsets(samples: Samples) -> list[int]:
    return list(accumulate(samples.documents, initial=0))


def _sample(case: Case, start: int, length: int) -> SequenceData:
    """Tokens of one sample out of the stream, and its labels without those that are masked."""
    generator = torch.Generator().manual_seed(case.seed * 7 + 5)
    count = sum(_samples(case).documents)
    stream = torch.randint(0, case.model.vocab_size, (count,), generator=generator)
    counts = torch.rand(count, generator=generator) >= case.ignored
    counts[start + 1] = True  # at least one
    labels = stream[start + 1 : start + length + 1].clone()
    labels[~counts[start + 1 : start + length + 1]] = IGNORED_LABEL
    return SequenceData(stream[start : start + length], labels)


def joined(samples: Iterable[SequenceData]) -> SequenceData:
    """Samples side by side in one sequence, each a document of its own."""
    parts = list(samples)
    starts = torch.tensor([0, *(len(data.tokens_S) for data in parts[:-1])]).cumsum(0)
    return SequenceData(
        torch.cat([data.tokens_S for data in parts]),
        torch.cat([data.labels_S for data in parts]),
        tuple(starts.tolist()),
    )


def padding(tokens: int) -> SequenceData:
    """Tokens that belong to no sample."""
    nothing = torch.zeros(tokens, dtype=torch.int64)
    return SequenceData(nothing, nothing.new_full((tokens,), IGNORED_LABEL))


def base_candidate(
    model: ModelConfig,
    *,
    degrees: tuple[int, int, int] = (1, 1, 1),
    sequence_parallel: str = "ulysses",
    trainable: Trainable = EVERYTHING,
    **options: Any,
) -> Candidate:
    """What a run of samples is planned for, on a machine with room for everything.

    Args:
        model: the shape.
        degrees: dp, pp, sp.
        sequence_parallel: ulysses or megatron.
        trainable: what trains.
        options: further attributes of the candidate.
    """
    data, pipeline, sequence = degrees
    workload = Workload(
        model,
        PRESETS["a100-80g"],
        dtype="fp32",
        sequence_parallel_degree=sequence,
        sequence_parallel=sequence_parallel,
        trainable=trainable,
    )
    return Candidate(
        workload,
        (1,),  # every step has sequences of its own
        pipeline_parallel_degree=pipeline,
        data_parallel_degree=data,
        **options,
    )
