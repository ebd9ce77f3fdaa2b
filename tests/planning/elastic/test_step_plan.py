"""Plans of steps of samples: they fit as evaluated, hold no more than that, and can be run."""

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sppo.cost.kv import kv_tokens
from sppo.cost.memory.walk import kv_held, walk_of
from sppo.planning.elastic.packing_search import PackingSearch
from sppo.planning.elastic.step_plan import StepPlanner
from sppo.planning.search.candidates import candidate_of, workload_of
from sppo.planning.search.choices import Degrees
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.schedule.actions import ActionKind, sequences_in_flight
from sppo.schedule.checks import validate
from sppo.schedule.orders.names import WHOLE_SEQUENCES, WITH_VIRTUAL_STAGES
from sppo.schedule.program import generate
from sppo.units import GIB
from tests.planning.cases import machine, run_config
from tests.planning.elastic.samples import lengths_of_samples
from tests.tiers import examples

SCHEDULES = (
    "sppo",
    "seq1f1b",
    "seq_zb_h1",
    "gpipe",
    "1f1b",
    "zb_h1",
    "looped_bfs",
    "interleaved_seq1f1b",
    "interleaved_1f1b",
)
POLICIES = ("auto", "retain", "recompute", "offload_all", "sppo")


@st.composite
def planners(draw, schedules=SCHEDULES, policies=POLICIES):
    """A planner of a model on a machine that may be too small."""
    schedule, policy = draw(st.sampled_from(schedules)), draw(st.sampled_from(policies))
    name, longest = draw(
        st.sampled_from([("gpt-7b", 65536), ("llama-3.2-1b", 131072), ("llama-3.2-1b", 9000)])
    )
    pipeline, group = draw(st.sampled_from([(1, 1), (1, 8), (2, 4), (4, 2), (8, 1)]))
    virtual = 1
    if schedule in WITH_VIRTUAL_STAGES:
        virtual = draw(st.integers(1, min(4, 16 // pipeline)))
    kv = ["auto", "retain"]
    if schedule == "looped_bfs":
        kv += ["offload", *(["recompute"] if policy in ("retain", "recompute") else [])]
    run = run_config(
        name,
        length=longest,
        parallel={"schedule": schedule, "data_parallel_degree": 1},
        activations={"policy": policy, "kv": draw(st.sampled_from(kv))},
    )
    hardware = machine(
        memory_bytes=int(draw(st.floats(12, 90)) * GIB),
        reserved_bytes=0,
        host_memory_bytes=draw(st.sampled_from([64, 2048])) * GIB,
        d2h_bytes_per_s=draw(st.floats(1e9, 4e10)),
        h2d_bytes_per_s=draw(st.floats(1e9, 4e10)),
        nodes=4,
    )
    degrees = Degrees(1, pipeline, group)
    workload = workload_of(run, hardware=hardware, degrees=degrees)
    base = candidate_of(run, workload, degrees, lengths=(longest,), virtual_stages=virtual)
    slices = 1 if schedule in WHOLE_SEQUENCES else draw(st.integers(1, 12))
    tries_sizes = schedule not in WHOLE_SEQUENCES and draw(st.booleans())
    return StepPlanner(PackingSearch(base, longest, slices, 128, tries_sizes))


@st.composite
def packed_candidates(draw, **of_planners):
    """A candidate with the sequences that a planner tries for some samples."""
    planner = draw(planners(**of_planners))
    packings = planner.packing_search.packings(draw(lengths_of_samples(longest=planner.longest)))
    return planner.base.with_packed(draw(st.sampled_from(packings)).sequences)


@settings(
    deadline=None, max_examples=examples(8, all=200), suppress_health_check=[HealthCheck.too_slow]
)
@given(planners(), st.data())
def test_a_plan_fits_and_can_be_run(planner, data):
    lengths = data.draw(lengths_of_samples(longest=planner.longest))
    try:
        plan = planner.plan(lengths)
    except MemoryError:
        assume(False)
    evaluated, candidate = plan.evaluated, plan.evaluated.candidate
    assert evaluated.device_peak_bytes <= candidate.budget_bytes
    assert plan.device_peak_bytes <= evaluated.device_peak_bytes + 8
    validate(plan.program)
    assert plan.program.lengths == tuple(sequence.lengths for sequence in plan.sequences)
    assert plan.num_samples == len(lengths)
    assert plan.tokens == sum(lengths) + plan.packed.padding_tokens
    assert plan.kinds.total() == len(candidate.lengths)
    assert len(plan.placements) == candidate.num_stages
    for stage in plan.placements:
        for own, sequence in zip(stage, plan.sequences, strict=True):
            for placement, tokens in zip(own, sequence.lengths, strict=True):
                rows = np.array([placement.retained, placement.offloaded, placement.recomputed])
                assert (rows.sum(axis=0) == tokens).all()
    assert planner.plan(lengths).program.digest() == plan.program.digest()


@settings(
    deadline=None, max_examples=examples(25, all=400), suppress_health_check=[HealthCheck.too_slow]
)
@given(packed_candidates())
def test_a_simulation_never_holds_more_than_what_was_evaluated(candidate):
    """Whether it fits or not."""
    evaluated = evaluate_candidate(candidate)
    for peak, stage in zip(evaluated.simulated_bytes, evaluated.memory, strict=True):
        assert peak <= stage.device.total_bytes + 8


@settings(
    deadline=None, max_examples=examples(25, all=400), suppress_health_check=[HealthCheck.too_slow]
)
@given(packed_candidates(policies=("retain",)), st.integers(0, 2**32 - 1))
def test_units_in_flight_are_those_of_the_program(candidate, seed):
    stages, ranks = candidate.num_stages, candidate.pipeline_parallel_degree
    count = len(candidate.lengths)
    schedule = generate(
        candidate.schedule,
        num_ranks=ranks,
        num_virtual=candidate.virtual_stages,
        lengths=candidate.sequence_lengths,
    )
    held, operands, forward, backward = np.random.default_rng(seed).random((4, stages, count))
    walk = walk_of(candidate)
    most = walked(schedule, held)
    assert walk.held(held).max(axis=1) == pytest.approx(most)
    counted = (walk.counts(held) * held).sum(axis=1)
    assert counted.reshape(-1, ranks).sum(axis=0) == pytest.approx(most)
    assert walk.held(held, deferred=operands).max(axis=1) == pytest.approx(
        walked(schedule, held, operands)
    )
    beside = walk.held(held, deferred=operands) + walk.running(np.stack([forward, backward]))
    assert beside.max(axis=1) == pytest.approx(
        walked(schedule, held, operands, running=(forward, backward))
    )
    assert walk.sequences_held.tolist() == [
        sequences_in_flight(a for a in schedule.programs[stage % ranks] if a.stage == stage)
        for stage in range(stages)
    ]
    token_bytes, _ = kv_tokens(candidate)
    kv = [walked_kv(program, token_bytes, candidate) for program in schedule.programs]
    assert kv_held(candidate)[0].max(axis=1) == pytest.approx(kv)


def walked(schedule, weights, operands=None, *, running=None):
    """Most that each rank holds along its program: weights from F to B, then operands to W."""
    first = list(schedule.unit_offsets)
    peaks = []
    for program in schedule.programs:
        split = any(action.kind is ActionKind.W for action in program)
        kept = np.zeros_like(weights) if operands is None or not split else operands
        forward, backward = running or np.zeros((2, *weights.shape))
        held = peak = 0.0
        for action in program:
            if action.kind not in (ActionKind.F, ActionKind.B, ActionKind.W):
                continue
            unit, before = (action.stage, first[action.sequence] + action.subsequence), held
            if action.kind is ActionKind.F:
                held += weights[unit]
                peak = max(peak, held + forward[unit])
            elif action.kind is ActionKind.B:
                held += kept[unit] - weights[unit]
                peak = max(peak, max(before, held) + backward[unit])
            else:
                held -= kept[unit]
        peaks.append(peak)
    return peaks


def walked_kv(program, token_bytes, candidate):
    """Most K and V that a rank holds of each sequence and stage, from its first F to its last B.

    What does not stay is away from its last F on. It is back at its first B where it is recomputed;
    where it is offloaded, as many backwards of the rank earlier as it has subsequences.
    """
    forwards, backwards, of_rank = {}, {}, []
    for place, action in enumerate(program):
        if action.kind is ActionKind.F:
            forwards.setdefault((action.stage, action.sequence), []).append(place)
        elif action.kind is ActionKind.B:
            backwards.setdefault((action.stage, action.sequence), []).append(place)
            of_rank.append(place)
    changes = []
    for (stage, number), there in forwards.items():
        first, last = there[0], there[-1]
        back, end = backwards[stage, number][0], backwards[stage, number][-1]
        between = [place for place in of_rank if last < place < back]
        match candidate.kv_of_stages[stage]:
            case "retained":
                spans = [(first, end)]
            case "recomputed":
                spans = [(first, last), (back, end)]
            case "offloaded":
                spans = [(first, last), ([*between[-len(there) :], back][0], end)]
        held = token_bytes[stage] * candidate.packed[number].tokens
        changes += [
            change for begin, stop in spans for change in ((begin, 0, held), (stop, 1, -held))
        ]
    return max(np.cumsum([change for _, _, change in sorted(changes)]))
