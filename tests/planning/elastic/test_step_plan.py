"""Plans of steps of samples: they fit as evaluated, hold no more than that, and can be run."""

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sppo.planning.elastic.step_planner import StepPlanner
from sppo.planning.partition import boundaries_by_length, lengths_of
from sppo.planning.search.candidates import candidate_of, workload_of
from sppo.planning.search.choices import Degrees
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.schedule.checks import validate
from sppo.schedule.orders.names import WHOLE_SEQUENCES, WITH_VIRTUAL_STAGES
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
UPPER = ("0-15", "3-15", "8-15", "15")
"""Layers with adapters; those below have no backward."""
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
        **draw(st.sampled_from([{}, *({"adapter": {"rank": 8, "layers": own}} for own in UPPER)])),
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
    slices = 1 if schedule in WHOLE_SEQUENCES else draw(st.integers(1, 12))
    cuts = boundaries_by_length(longest, num_subsequences=slices, alignment=128)
    base = candidate_of(run, workload, degrees, lengths=lengths_of(cuts), virtual_stages=virtual)
    tries_sizes = schedule not in WHOLE_SEQUENCES and draw(st.booleans())
    return StepPlanner(base, alignment=128, tries_sizes=tries_sizes)


@st.composite
def packed_candidates(draw, **of_planners):
    """A candidate with the sequences that a planner tries for some samples."""
    planner = draw(planners(**of_planners))
    packings = planner.packings(draw(lengths_of_samples(longest=planner.longest)))
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
