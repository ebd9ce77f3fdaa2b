"""Samples packed into sequences train as if each were alone: in float64, in every layout.

Ranks are threads of this process, whose messages move at moments that a seed chooses
(:mod:`tests.random_training.emulated_ranks`).
"""

from dataclasses import replace
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sppo.cost.packed_sequence import PackedSequence
from sppo.engine.pipeline import Pipeline
from sppo.planning.elastic.packing import PADDING
from sppo.planning.elastic.packing_search import PackingSearch
from sppo.planning.elastic.step_plan import StepPlanner
from sppo.schedule.orders.names import WHOLE_SEQUENCES, WITH_VIRTUAL_STAGES
from tests.engine.models import (
    VARIANTS,
    Trained,
    assert_same_step,
    autograd_step,
    random_weights,
    tiny_model,
)
from tests.engine.packed_steps import PackedStep, base_candidate, hand_packed_step, planned_step
from tests.engine.pipelined import Case, run_case
from tests.engine.test_pipeline import assembled
from tests.random_training.emulated_ranks import run_emulated
from tests.tiers import examples

LONGEST = 40
LAYOUTS = [
    ((1, 1, 1), "ulysses"),
    ((1, 1, 2), "ulysses"),
    ((1, 1, 2), "megatron"),
    ((1, 2, 1), "ulysses"),
    ((1, 2, 2), "ulysses"),
    ((1, 2, 2), "megatron"),
    ((1, 3, 1), "ulysses"),
    ((1, 4, 1), "ulysses"),
    ((2, 1, 1), "ulysses"),
    ((2, 2, 2), "megatron"),
]
"""Degrees dp, pp, sp, and how the ranks of the last one share a subsequence."""
SCHEDULES = (
    "sppo",
    "seq1f1b",
    "seq_zb_h1",
    "gpipe",
    "interleaved_seq1f1b",
    "looped_bfs",
    "1f1b",
    "zb_h1",
    "interleaved_1f1b",
)
PLACEMENTS = {
    "retain": {"policy": "retain"},
    "keep_attention": {"policy": "keep_attention"},
    "recompute": {"policy": "recompute"},
    "offload_all": {"policy": "offload_all"},
    "sppo": {"policy": "sppo"},
    "half offloaded": {"offload_ratio": 0.5},
}
"""Policies of saved activations; the last three move them to a disk."""


@st.composite
def lengths_of_samples(draw, *, least):
    """Tokens of the samples of a step: many of one token, some of the most there are."""
    tokens = st.one_of(st.just(1), st.integers(1, 6), st.integers(1, LONGEST), st.just(LONGEST))
    return draw(st.lists(tokens, min_size=least, max_size=9))


@st.composite
def packed_sequences(draw, *, least_tokens, whole):
    """Sequences of samples that Algorithm 1 would not make, for one replica."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        samples = draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=5))
        samples[0] += max(0, least_tokens - sum(samples))
        cuts = draw(st.sets(st.integers(1, sum(samples)), max_size=4)) if not whole else set()
        places = [0]
        for place in sorted(cuts):
            if place - places[-1] >= least_tokens and sum(samples) - place >= least_tokens:
                places.append(place)
        ends = [*places, sum(samples)]
        found.append(PackedSequence(tuple(samples), tuple(b - a for a, b in pairwise(ends))))
    return found


@st.composite
def cases(draw):
    """A layout, a schedule and a policy, and two steps of samples."""
    shape, sequence_parallel = draw(st.sampled_from(LAYOUTS))
    schedule = draw(st.sampled_from(SCHEDULES))
    virtual = draw(st.integers(1, 2)) if schedule in WITH_VIRTUAL_STAGES else 1
    options = {**PLACEMENTS[draw(st.sampled_from(sorted(PLACEMENTS)))]}
    options["input_every"] = draw(st.sampled_from([1, 1, 2]))
    if schedule == "looped_bfs" and virtual > 1:
        kv = ["retained", "offloaded"]
        if options["input_every"] == 1 and options.get("policy") in (
            "retain", "keep_attention", "recompute",
        ):  # fmt: skip
            kv.append("recomputed")
        options["kv"] = draw(st.sampled_from(kv))
    case = Case(
        draw(st.sampled_from(sorted(VARIANTS))),
        shape=shape,
        sequence_parallel=sequence_parallel,
        schedule=schedule,
        virtual=virtual,
        input_every=options["input_every"],
        # Replicas that run programs of their own meet at the end of a step only.
        zero=draw(st.sampled_from([1, 2, 3])) if shape[0] == 1 else 1,
        steps=2,
        sizes={"num_layers": shape[1] * virtual + draw(st.integers(0, 1))},
    )
    whole = schedule in WHOLE_SEQUENCES
    base = base_candidate(
        case.model(),
        degrees=shape,
        sequence_parallel=sequence_parallel,
        schedule=schedule,
        virtual_stages=virtual,
        **options,
    )
    return replace(case, packed=tuple(draw(steps(base, whole=whole, seed=50 * n)) for n in (0, 1)))


@st.composite
def steps(draw, base, *, whole, seed):
    """A step of every replica: packed as a run packs its samples, or in any other way."""
    least = base.workload.sequence_parallel_degree
    if draw(st.booleans()):
        return planned_step(
            base,
            draw(lengths_of_samples(least=base.data_parallel_degree)),
            longest=LONGEST,
            slices=1 if whole else draw(st.integers(1, LONGEST // least)),
            alignment=draw(st.sampled_from([1, 3])),
            seed=seed,
        )
    mixed, paced = draw(st.booleans()), draw(st.sampled_from([None, 0.0, 0.5]))
    packed = [
        draw(packed_sequences(least_tokens=least, whole=whole))
        for _ in range(base.data_parallel_degree)
    ]
    return tuple(
        hand_packed_step(
            base,
            sequences,
            seed=seed + 20 * replica,
            mixed=mixed,
            paced=paced,
        )
        for replica, sequences in enumerate(packed)
    )


def answers_of(case):
    """What every rank has of every step."""
    return run_emulated(run_case, case, ranks=case.mesh.num_ranks, seed=0)


def check(case):
    answers = answers_of(case)
    for step in range(case.steps):
        expected = autograd_step(
            case.model(), random_weights(case.model()), case.all_sequences(step)
        )
        assert_same_step(assembled(case, answers, step), expected, tolerance=1e-10)
        for answer in answers:
            assert answer[step][3] == answer[step][4]  # what was executed is the program


@settings(
    deadline=None,
    derandomize=True,
    max_examples=examples(5, all=80),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=cases())
def test_samples_train_as_if_each_were_alone(case, tmp_path):
    check(replace(case, directory=str(tmp_path)))


@settings(
    deadline=None,
    derandomize=True,
    max_examples=examples(3, all=60),
    suppress_health_check=[
        HealthCheck.filter_too_much,
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
    ],
)
@given(case=cases())
def test_offloading_changes_no_bit(case, tmp_path):
    """Whatever the levels of units are, which differ from stage to stage."""
    case = replace(case, directory=str(tmp_path))
    assume(any(own.plan.evaluated.placement.offloads_anything for own in chain(*case.packed)))
    retaining = tuple(tuple(own.without_offloading() for own in step) for step in case.packed)
    for offloaded, retained in zip(
        answers_of(case), answers_of(replace(case, packed=retaining)), strict=True
    ):
        for (loss, _, gradients, *_), (expected, _, others, *_) in zip(
            offloaded, retained, strict=True
        ):
            assert loss == expected
            for name, (_, gradient) in gradients.items():
                assert torch.equal(gradient, others[name][1]), name


def counting(case, sample, *, changed):
    """The first step of ``case``, where only the labels of one sample of a replica count.

    Args:
        case: of packed samples.
        sample: a replica, and the place of a sample in it.
        changed: whether all other samples have other tokens.
    """
    replica, index = sample
    first = tuple(
        replace(own, counted=index if number == replica else PADDING - 1, changed=changed)
        for number, own in enumerate(case.packed[0])
    )
    return replace(case, packed=(first,), steps=1)


@settings(
    deadline=None,
    derandomize=True,
    max_examples=examples(2, all=30),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=cases(), data=st.data())
def test_no_bit_of_a_sample_depends_on_another(case, data, tmp_path):
    """Neither of its loss, nor of the gradient of any parameter that comes of its loss."""
    case = replace(case, directory=str(tmp_path))
    samples = [
        (replica, index)
        for replica, own in enumerate(case.packed[0])
        for indices in own.packed.samples
        for index in indices
        if index != PADDING
    ]
    sample = data.draw(st.sampled_from(samples))
    before, after = (
        answers_of(counting(case, sample, changed=changed)) for changed in (False, True)
    )
    for ((loss, _, gradients, *_),), ((found, _, moved, *_),) in zip(before, after, strict=True):
        assert loss == found
        for name, (_, gradient) in gradients.items():
            assert torch.equal(gradient, moved[name][1]), name


@pytest.mark.parametrize("policy", ["retain", "keep_attention", "recompute"])
@pytest.mark.parametrize(
    ("schedule", "virtual"), [("sppo", 1), ("seq1f1b", 1), ("gpipe", 1), ("looped_bfs", 2)]
)
def test_bytes_held_are_those_predicted(schedule, virtual, policy):
    """Of steps one after another, the second of them the largest, by one engine."""
    model = tiny_model("gqa, q/k-norm", num_layers=4)
    base = base_candidate(model, schedule=schedule, virtual_stages=virtual, policy=policy)
    planner = StepPlanner(PackingSearch(base, LONGEST, 5, 1, tries_sizes=False))
    trained = Trained(
        model,
        random_weights(model, dtype=torch.float32),
        pipeline=Pipeline(schedule, num_virtual=virtual),
    )
    for lengths in ([40, 40, 5], [40, 7, 40, 3, 1, 12], [3, 3]):
        plan = planner.plan(lengths)
        step = PackedStep(plan)
        trained.step(step.sequences(model), step.cuts, planned=step.planned)
        (stage,) = plan.evaluated.memory
        planned, peaks = stage.device, trained.engine.take_peaks()
        saved = planned.activations_bytes + planned.loss_gradient_bytes
        assert peaks.activations_bytes == saved
        assert peaks.kv_bytes == planned.kv_bytes + planned.kv_gradients_bytes
