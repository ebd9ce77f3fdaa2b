"""Placements of activation policies, for any numbers and for models on machines of little
memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sppo.activations.hybrid import choices, least_memory
from sppo.activations.placement import (
    ROW_ALIGNMENT,
    ActivationPlacement,
    kinds_of_rows,
    prefix_rows,
)
from sppo.activations.policy import OFFLOADING_POLICIES, POLICIES, decide, decide_ratio
from sppo.activations.policy_inputs import PolicyInputs
from sppo.activations.tensor_classes import ATTENTION, LINEAR, X_IN
from sppo.cost.candidate import Candidate
from sppo.cost.workload import Workload
from sppo.planning.search.choices import Degrees
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.units import GIB
from tests.planning.cases import A100, candidate_of_subsequences, machine, run_config
from tests.tiers import examples

EVERY_POLICY = (*POLICIES, *OFFLOADING_POLICIES)
seeds = st.integers(0, 2**32 - 1)


ROUNDING_BYTES = 2
"""What hybrid sets aside on every stage."""


def random_inputs(seed, *, allow_partial=True, room=None):
    """Any numbers, with room for some share of everything on the device and behind it."""
    random = np.random.default_rng(seed)
    ranks, num_subsequences = random.integers(1, 3), random.integers(1, 8)
    stages = ranks * random.integers(1, 4)
    shape = (stages, num_subsequences)
    tokens = random.integers(1, 2000, size=num_subsequences)
    row_bytes = random.integers(1, 1000, size=(stages, 3)).astype(float)
    shared_by = random.choice([1, 2, 5])
    in_flight = random.integers(1, 3, size=shape)
    everything = ((tokens * in_flight) * row_bytes.sum(axis=1)[:, None]).sum(axis=1)
    everything = everything.reshape(-1, ranks).sum(axis=0)
    forward_s = 0.5 + random.random(shape)
    saved = tokens * row_bytes.sum(axis=1)[:, None]
    hidden = forward_s * random.random() * saved.mean()
    hidden[:, -1] = 0.0
    return PolicyInputs(
        tokens=tokens,
        row_bytes=row_bytes,
        shared_input_bytes=row_bytes[:, X_IN] * (shared_by - 1),
        in_flight=in_flight,
        sequences=in_flight.max(axis=1),
        next_forward_s=forward_s,
        hidden_bytes=hidden,
        linear_recompute_s=random.random(shape),
        attention_recompute_s=random.random(shape),
        copy_bytes_per_s=float(hidden.mean()) + 1,
        may_offload=np.ones(stages, dtype=bool),
        device_bytes=everything * (random.random(ranks) if room is None else room),
        tier_bytes=everything * random.choice([0.1, 0.5, 1.5]),
        slots=tuple(_slots(rows, random) for rows in row_bytes[:ranks]),
        allow_partial=allow_partial,
    )


def _slots(row_bytes, random):
    """Seven layers' worth of the subsequence that moves most, of four, and joined parts."""
    padding_bytes, joined_bytes = 100 * random.random(), 1e4 * random.random()

    def bytes_of(placement):
        blocks = (placement.offloaded @ row_bytes).max() * 7 / 4
        is_cut = (placement.retained > 0) & (placement.offloaded > 0)
        return blocks + padding_bytes * (blocks > 0) + joined_bytes * is_cut.any()

    return bytes_of


def every_placement(inputs):
    fixed = [decide(policy, inputs) for policy in EVERY_POLICY if policy != "hybrid"]
    ratios = [decide_ratio(inputs, ratio=ratio) for ratio in (0.0, 0.3, 1.0)]
    return [*fixed, *ratios, *choices(inputs)]


def is_whole(placement, tokens):
    """Whether a class of a subsequence has one fate, [stages, subsequences, 3]."""
    fates = np.stack([placement.retained, placement.offloaded, placement.recomputed])
    return (fates == tokens[:, None]).any(axis=0)


@settings(max_examples=examples(15, all=40))
@given(seeds)
def test_every_row_has_one_fate_and_one_class_at_most_is_cut(seed):
    inputs = random_inputs(seed)
    for placement in every_placement(inputs):
        for rows in (placement.retained, placement.offloaded, placement.recomputed):
            assert (rows >= 0).all()
        together = placement.retained + placement.offloaded + placement.recomputed
        assert (together == inputs.tokens[:, None]).all()
        assert (placement.tokens == inputs.tokens).all()
        assert not placement.recomputed[:, :, X_IN].any()
        cut = ~is_whole(placement, inputs.tokens)
        assert (cut.sum(axis=2) <= 1).all()
        assert not (placement.offloaded[cut] % ROW_ALIGNMENT).any()
        assert not (placement.recomputed[cut & (placement.retained > 0)] % ROW_ALIGNMENT).any()
    # The backward of the last subsequence starts at once.
    for placement in (decide("sppo", inputs), *choices(inputs)):
        assert not placement.offloaded[:, -1].any()


@settings(max_examples=examples(15, all=40))
@given(seeds)
def test_nothing_is_cut_where_that_is_not_allowed(seed):
    inputs = random_inputs(seed, allow_partial=False)
    for placement in every_placement(inputs):
        assert is_whole(placement, inputs.tokens).all()


@settings(max_examples=examples(15, all=40))
@given(seeds)
def test_hybrid_leaves_everything_where_it_fits(seed):
    inputs = random_inputs(seed, room=1.001)
    inputs = replace(inputs, device_bytes=inputs.device_bytes + ROUNDING_BYTES)
    (placement,) = choices(inputs)
    assert (placement.retained == inputs.tokens[:, None]).all()
    assert not placement.offloads_anything


@settings(max_examples=examples(30, all=100))
@given(seeds)
def test_all_choices_of_hybrid_stay_within_its_room(seed):
    inputs = random_inputs(seed)
    for placement in choices(inputs):
        assert (inputs.needed(placement) <= inputs.device_bytes).all()
        assert (inputs.needed_in_tier(placement) <= inputs.tier_bytes).all()


@settings(max_examples=examples(10, all=50))
@given(seeds)
def test_the_least_placement_keeps_nothing_that_frees_memory(seed):
    inputs = random_inputs(seed)
    placement = least_memory(inputs)
    frees = inputs.row_bytes[:, ATTENTION] > inputs.shared_input_bytes
    assert placement.recomputed[:, :, LINEAR].all()
    assert placement.recomputed[frees][:, :, ATTENTION].all()
    everything = decide("recompute", inputs)
    if frees.all():
        assert (inputs.needed(placement) <= inputs.needed(everything)).all()
    assert (inputs.needed_in_tier(placement) <= inputs.tier_bytes).all()


def value_of_rows(inputs):
    """Seconds of recomputation for each byte held on the device, [stages, N, 3]; inf of inputs."""
    row_bytes = np.repeat(inputs.row_bytes[:, None], len(inputs.tokens), axis=1)
    row_bytes[:, :, ATTENTION] -= inputs.shared_input_bytes[:, None]
    held = row_bytes * inputs.tokens[:, None] * inputs.in_flight[:, :, None]
    seconds = np.full(held.shape, np.inf)
    seconds[:, :, ATTENTION] = inputs.attention_recompute_s
    seconds[:, :, LINEAR] = inputs.linear_recompute_s
    return np.where(held > 0, seconds / np.maximum(held, 1e-9), np.inf)


@settings(max_examples=examples(30, all=200))
@given(seeds)
def test_no_exchange_of_rows_would_recompute_less(seed):
    """Whatever the device retains costs more to recompute per byte than what is recomputed."""
    inputs = random_inputs(seed)
    shape = inputs.linear_recompute_s.shape
    linear = np.repeat(inputs.row_bytes[:, LINEAR], shape[1]).reshape(shape) * inputs.tokens
    inputs = replace(inputs, linear_recompute_s=linear * inputs.in_flight * 1e-4)
    value, ranks = value_of_rows(inputs), len(inputs.slots)
    for placement in choices(inputs):
        for rank in range(ranks):
            own, of_rank = placement.of_stages(slice(rank, None, ranks)), value[rank::ranks]
            recomputed = of_rank[own.recomputed > 0].max(initial=0.0)
            assert of_rank[own.retained > 0].min(initial=np.inf) >= recomputed * (1 - 1e-9)


@settings(max_examples=examples(15, all=40))
@given(seeds)
def test_what_hides_is_what_the_paper_moves(seed):
    """alpha_i A_i = BW T_c, in whole rows: at most that, and less than a cut below it."""
    inputs = random_inputs(seed)
    offloaded = (decide("sppo", inputs).offloaded * inputs.row_bytes[:, None, :]).sum(axis=2)
    wanted = np.minimum(inputs.hidden_bytes, inputs.class_bytes.sum(axis=2))
    cut = ROW_ALIGNMENT * inputs.row_bytes.max(axis=1)[:, None]
    assert (offloaded <= wanted * (1 + 1e-9)).all()
    assert (offloaded[:, :-1] > (wanted - cut)[:, :-1]).all()


def test_classes_leave_in_the_order_of_their_value():
    rows = prefix_rows(
        np.array([0.0, 1280.0, 3000.0, 9000.0]),
        rows=np.full((4, 3), 1000),
        row_bytes=np.array([1.0, 2.0, 3.0]),
    )
    assert rows.tolist() == [[0, 0, 0], [1000, 128, 0], [1000, 1000, 0], [1000, 1000, 1000]]


def test_policies_by_name_do_what_they_say():
    inputs = random_inputs(1)
    retained = {policy: decide(policy, inputs).retained > 0 for policy in POLICIES}
    assert [retained[policy][0, 0].tolist() for policy in POLICIES] == [
        [True, True, True],
        [True, True, False],
        [True, False, False],
    ]
    assert (decide("offload_all", inputs).offloaded == inputs.tokens[:, None]).all()


def test_what_cannot_be_decided_is_said():
    nowhere = replace(random_inputs(1), copy_bytes_per_s=0.0)
    with pytest.raises(
        ValueError, match="policy 'sppo' offloads activations, and this machine has no"
    ):
        decide("sppo", nowhere)
    with pytest.raises(
        ValueError, match="offload_ratio 0.5 offloads activations, and this machine"
    ):
        decide_ratio(nowhere, ratio=0.5)
    assert not decide_ratio(nowhere, ratio=0.0).offloads_anything
    with pytest.raises(ValueError, match="'fast' is not one of retain, .*, hybrid"):
        decide("fast", nowhere)


# Of a model on a machine.


@st.composite
def candidates(draw):
    """A model on too little memory, cut and sharded in some way."""
    name, length = draw(st.sampled_from([("gpt-7b", 131072), ("llama-3.2-1b", 262144)]))
    pipeline, group = draw(st.sampled_from([(1, 8), (2, 4), (4, 2), (4, 8)]))
    rate = draw(st.floats(1e9, 4e10))
    hardware = machine(
        memory_bytes=int(draw(st.floats(4, 70)) * GIB),
        reserved_bytes=0,
        host_memory_bytes=draw(st.sampled_from([0, 8, 64, 2048])) * GIB,
        d2h_bytes_per_s=rate,
        h2d_bytes_per_s=rate * draw(st.sampled_from([0.5, 1.0])),
        nodes=4,
    )
    run = run_config(
        name,
        length=length,
        train={"sequences_per_step": draw(st.integers(1, 2))},
        activations={"input_every": draw(st.sampled_from([1, 1, 2, 3, 8]))},
    )
    return candidate_of_subsequences(
        run,
        hardware=hardware,
        degrees=Degrees(1, pipeline, group),
        num_subsequences=draw(st.sampled_from([8, 16, 40])),
    )


def evaluated_by_policy(candidate):
    """Every policy that the machine can serve, by name."""
    policies = [*POLICIES, "hybrid"]
    if candidate.workload.hardware.node.host_memory_bytes:
        policies += ["sppo", "offload_all"]
    return {policy: evaluate_candidate(replace(candidate, policy=policy)) for policy in policies}


@settings(max_examples=examples(10, all=25))
@given(candidates())
def test_hybrid_is_never_slower_than_what_else_fits(candidate):
    """It waits and recomputes only where moving what hides does not do."""
    hardware = candidate.workload.hardware
    found = evaluated_by_policy(candidate)
    hybrid = found["hybrid"]
    for one in found.values():
        if one.shortfall is not None:
            assert one.shortfall.short_bytes > 0
            continue
        assert one.device_peak_bytes <= hardware.device.usable_bytes
        assert one.host_peak_bytes <= hardware.host_bytes_per_device
        assert hybrid.shortfall is None
        assert hybrid.time.step_s <= one.time.step_s * (1 + 1e-9)
    if any(name in found and found[name].shortfall is None for name in ("retain", "sppo")):
        assert hybrid.simulated.exposed_copy_s == 0
        assert not hybrid.placement.recomputed.any()
    if found["retain"].shortfall is None:
        assert hybrid.effective_policy == "retain"


@settings(max_examples=examples(15, all=60))
@given(candidates(), st.sampled_from(EVERY_POLICY[:-1]), st.floats(0, 0.1))
def test_hybrid_fits_and_is_as_fast_where_another_fits_by_a_hair(candidate, policy, share):
    """Whatever room it decides in, and within what the closed form that ranks placements is off."""
    offloads = policy in OFFLOADING_POLICIES
    assume(candidate.workload.hardware.node.host_memory_bytes or not offloads)
    roomy = evaluate_candidate(replace(with_memory(candidate, 1024 * GIB), policy=policy))
    assume(roomy.shortfall is None)
    tight = with_memory(candidate, int(roomy.device_peak_bytes * (1 + share)) + 1)
    found = evaluated_by_policy(tight)
    assert found[policy].shortfall is None
    hybrid = found.pop("hybrid")
    assert hybrid.shortfall is None
    seconds = [one.step_s for one in found.values() if one.shortfall is None]
    assert hybrid.step_s <= min(seconds) * (1.03 if candidate.input_every == 1 else 1.05)


@settings(max_examples=examples(8, all=100))
@given(candidates(), st.floats(0.1, 0.9), st.randoms(use_true_random=False))
def test_no_exchange_of_rows_makes_a_step_faster(candidate, share, random):
    """Rows that are kept for others that are recomputed, of any two stages or subsequences.

    Within 0.3 %, by which values per byte differ from seconds of a step with idle ranks.
    """
    roomy = with_memory(candidate, 4096 * GIB)
    least, most = (
        evaluate_candidate(replace(roomy, policy=policy)).device_peak_bytes
        for policy in ("recompute", "retain")
    )
    found = evaluate_candidate(with_memory(candidate, int(least + share * (most - least))))
    assume(found.shortfall is None and found.placement.recomputed.any())
    step_s = found.step_s
    for _ in range(5):
        exchanged = with_rows_exchanged(found.placement, random)
        other = exchanged and EvaluatedCandidate(found.candidate, exchanged)
        if other and other.shortfall is None:
            assert other.step_s >= step_s * (1 - 0.003)


def with_rows_exchanged(placement, random):
    """Rows of a class that one unit recomputes and another keeps, exchanged; None without any."""
    name, index = random.choice(["retained", "offloaded"]), random.choice([ATTENTION, LINEAR])
    tables = {n: getattr(placement, n).copy() for n in ("retained", "offloaded", "recomputed")}
    kept, recomputed = tables[name][:, :, index], tables["recomputed"][:, :, index]
    to_keep, to_recompute = np.argwhere(recomputed > 0).tolist(), np.argwhere(kept > 0).tolist()
    if not to_keep or not to_recompute:
        return None
    one, other = tuple(random.choice(to_keep)), tuple(random.choice(to_recompute))
    rows = min(recomputed[one], kept[other])
    for unit, sign in ((one, 1), (other, -1)):
        kept[unit] += sign * rows
        recomputed[unit] -= sign * rows
    return ActivationPlacement(**tables)


def with_memory(candidate, memory_bytes):
    hardware = machine(candidate.workload.hardware, memory_bytes=memory_bytes)
    return replace(candidate, workload=replace(candidate.workload, hardware=hardware))


def test_a_ratio_beside_a_policy_that_moves_nothing_is_refused():
    candidate = Candidate(
        Workload(run_config().model, A100), (4096, 4096), policy="recompute", offload_ratio=0.5
    )
    with pytest.raises(ValueError, match="0.5 with activations.policy 'recompute', which offloads"):
        evaluate_candidate(candidate)


def test_a_tier_too_small_to_help_costs_nothing():
    """Room for copies on their way is taken only where something moves."""
    run = run_config("llama-3.2-1b", length="128Ki")
    steps = []
    for host in (0, 1, 2 * GIB):
        hardware = machine(memory_bytes=16 * GIB, host_memory_bytes=host)
        candidate = candidate_of_subsequences(
            run, hardware=hardware, degrees=Degrees(1, 1, 8), num_subsequences=16
        )
        steps.append(evaluate_candidate(candidate).time.step_s)
    assert steps[0] >= steps[1] * (1 - 1e-12) >= steps[2] * (1 - 1e-12)


def test_a_class_whole_up_to_rounding_leaves_nothing_of_the_next():
    tokens, sizes = np.array([4096]), np.array([100.0, 60.0, 300.0])
    wanted = tokens * sizes[0] * (1 - 5e-13)
    rows = prefix_rows(wanted, rows=np.repeat(tokens[:, None], 3, axis=1), row_bytes=sizes)
    assert rows.tolist() == [[4096, 0, 0]]


def test_stages_of_a_kind_are_those_with_equal_rows():
    rows = np.array([[1, 2], [1, 2], [3, 2], [1, 2], [3, 2]])
    firsts, kinds = kinds_of_rows(rows)
    assert (firsts, kinds) == ([0, 2], [0, 0, 1, 0, 1])
    assert (rows[firsts][kinds] == rows).all()
