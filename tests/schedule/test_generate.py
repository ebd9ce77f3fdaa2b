from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sppo.schedule.actions import ActionKind, Op
from sppo.schedule.checks import check_deadlock_free, validate
from sppo.schedule.orders.names import WHOLE_SEQUENCES, WITH_VIRTUAL_STAGES, schedule_names
from sppo.schedule.orders.rank_orders import encoded_orders, sequence_groups
from sppo.schedule.program import forward_part, generate
from sppo.schedule.transfers.communication import place_messages
from tests.schedule.cases import SUBSEQUENCE_SCHEDULES, in_flight, make, play
from tests.schedule.pacing import forwards_between, most_forwards
from tests.tiers import examples

ragged = st.lists(
    st.lists(st.integers(6, 40), min_size=1, max_size=8).map(tuple), min_size=1, max_size=10
).map(tuple)


def order(schedule, rank, kinds="FBW"):
    return [str(a) for a in schedule.programs[rank] if a.kind.value in kinds]


@settings(max_examples=examples(60, all=400))
@given(st.sampled_from(schedule_names()), st.integers(1, 6), st.integers(1, 4), ragged)
def test_any_ragged_request_gives_a_valid_program_that_no_queue_blocks(name, p, v, lengths):
    v = v if name in WITH_VIRTUAL_STAGES else 1
    lengths = [own[:1] for own in lengths] if name in WHOLE_SEQUENCES else lengths
    schedule = generate(name, num_ranks=p, num_virtual=v, lengths=lengths)
    validate(schedule)
    sent = place_messages(schedule)
    validate(sent)
    check_deadlock_free(sent)
    counts = Counter(a.kind for program in schedule.programs for a in program)
    if name != "sppo_msp":
        assert counts[ActionKind.F] == counts[ActionKind.B] == p * v * schedule.num_units
    assert counts[ActionKind.REDUCE] == p * v


@settings(max_examples=examples(25, all=60))
@given(st.sampled_from(SUBSEQUENCE_SCHEDULES), st.integers(1, 5), st.integers(1, 3), ragged)
def test_forward_only_programs_are_valid_and_hold_only_forwards(name, p, v, lengths):
    v = v if name in WITH_VIRTUAL_STAGES else 1
    schedule = forward_part(generate(name, num_ranks=p, num_virtual=v, lengths=lengths))
    validate(place_messages(schedule))
    assert {a.kind for program in schedule.programs for a in program} == {ActionKind.F}


@settings(max_examples=examples(25, all=60))
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 8))
def test_peak_in_flight_of_seq1f1b(p, m, n):
    schedule = make("seq1f1b", p=p, m=m, n=n)
    assert in_flight(play(schedule)) == [min(m * n, p - r - 1 + n) for r in range(p)]


def test_a_long_sequence_holds_no_more_once_it_is_through():
    """After 4 subsequences come single ones, of which as many are held as under plain 1F1B."""
    schedule = generate("seq1f1b", num_ranks=2, lengths=[(8,) * 4, *[(8,)] * 4])
    assert "".join(action[1] for action in order(schedule, 0, "FB")) == "FFFFFBBBBFBFBFBB"
    assert "".join(action[1] for action in order(schedule, 1, "FB")) == "FFFFBBBBFBFBFBFB"


def test_a_long_sequence_holds_no_more_once_it_is_through_on_several_stages():
    """After 4 subsequences come groups of 2: 2 (p - 1) + (v - 1) * 2 + 1 are held, no longer 8."""
    lengths = [(8,) * 4, *[(8,)] * 6]
    schedule = generate("interleaved_seq1f1b", num_ranks=2, num_virtual=2, lengths=lengths)
    kinds = [action[1] for action in order(schedule, 0, "FB")]
    held = [kinds[:place].count("F") - kinds[:place].count("B") for place in range(len(kinds))]
    assert held[:11] == [*range(10), 10]
    assert max(held[kinds.index("B") + 9 :]) == 5


@settings(max_examples=examples(25, all=100))
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.integers(1, 8))
def test_equal_sequences_pair_up_after_a_constant_warm_up(p, v, m, n):
    """With groups of G units, (v - 1) * G + N - 1 forwards on the last rank, more on others."""
    lengths = ((8,) * n,) * m
    groups = sequence_groups(lengths, num_ranks=p)
    assume(len({len(group) for group in groups}) == 1)
    codes, _ = encoded_orders("interleaved_seq1f1b", num_ranks=p, num_virtual=v, lengths=lengths)
    for rank, own in enumerate(codes.tolist()):
        warmup = min(v * m * n, (v - 1) * len(groups[0]) * n + n - 1 + 2 * (p - 1 - rank))
        pairs = v * m * n - warmup
        assert own == [Op.F] * warmup + [Op.F, Op.B] * pairs + [Op.B] * warmup


@settings(max_examples=examples(25, all=150))
@given(
    st.sampled_from(["sppo", "seq1f1b", "seq_zb_h1", "gpipe"]),
    st.integers(1, 5),
    ragged,
    st.floats(0, 1),
)
def test_forwards_begin_when_they_are_asked_to(name, p, lengths, share):
    asked = forwards_between(name, num_ranks=p, lengths=lengths, share=share)
    schedule = generate(name, num_ranks=p, lengths=lengths, forwards_before_backward=asked)
    validate(place_messages(schedule))
    assert most_forwards(name, num_ranks=p, lengths=lengths) >= asked
    for program, counts in zip(schedule.programs, asked, strict=True):
        kinds = [a.kind.value for a in program if a.kind.value in "FB"]
        before = [kinds[:place].count("F") for place, kind in enumerate(kinds) if kind == "B"]
        assert before == list(counts)
    plain = generate(name, num_ranks=p, lengths=lengths)
    free = most_forwards(name, num_ranks=p, lengths=lengths)
    assert (
        generate(name, num_ranks=p, lengths=lengths, forwards_before_backward=free).programs
        == plain.programs
    )


def test_a_single_sequence_makes_sppo_and_seq1f1b_the_same_program():
    sppo, seq = make("sppo", p=4, n=8, m=1), make("seq1f1b", p=4, n=8, m=1)
    assert sppo.programs == seq.programs


def test_sppo_on_one_rank_runs_sequence_after_sequence():
    schedule = make("sppo", p=1, n=2, m=2)
    assert order(schedule, 0) == [
        "0F0.0", "0F0.1", "0B0.1", "0B0.0", "0F1.0", "0F1.1", "0B1.1", "0B1.0",
    ]  # fmt: skip
    assert in_flight(play(schedule)) == [2]


def test_the_looped_order_ends_one_stage_before_it_begins_the_next():
    schedule = make("looped_bfs", p=2, v=2, n=2, m=1)
    assert order(schedule, 0) == [
        "0F0.0", "0F0.1", "2F0.0", "2F0.1", "2B0.1", "2B0.0", "0B0.1", "0B0.0",
    ]  # fmt: skip
    assert order(schedule, 1, "F") == ["1F0.0", "1F0.1", "3F0.0", "3F0.1"]


def test_the_looped_order_takes_sequences_together_only_to_fill_the_ranks():
    for p, n, groups in ((2, 2, 2), (3, 2, 1), (1, 1, 2), (4, 1, 1)):
        schedule = make("looped_bfs", p=p, v=2, n=n, m=2)
        kinds = "".join(a.kind.value for a in schedule.programs[0] if a.kind.value in "FB")
        assert kinds == ("F" * (4 * n // groups) + "B" * (4 * n // groups)) * groups


def test_zero_bubble_delays_the_weights_of_later_ranks():
    schedule = make("zb_h1", p=2, n=1, m=3)
    assert order(schedule, 0) == [
        "0F0.0", "0F1.0", "0B0.0", "0W0.0", "0F2.0", "0B1.0", "0W1.0", "0B2.0", "0W2.0",
    ]  # fmt: skip
    assert order(schedule, 1)[:4] == ["1F0.0", "1B0.0", "1F1.0", "1B1.0"]
    assert order(schedule, 1)[4] == "1W0.0"


@pytest.mark.parametrize(
    ("name", "rest", "message"),
    [
        ("2f2b", {}, "'2f2b' is not known: choose one of gpipe"),
        ("1f1b", {"n": 4}, "use seq1f1b, or 1 subsequence"),
        ("zb_h1", {"n": 2}, "use seq_zb_h1"),
        ("interleaved_1f1b", {"n": 2}, "use interleaved_seq1f1b"),
        ("seq1f1b", {"v": 2}, "num_virtual 2: use one of interleaved"),
        ("seq1f1b", {"v": 0}, "both must be at least 1"),
        ("seq1f1b", {"p": 0}, "both must be at least 1"),
        ("seq1f1b", {"m": 0}, "at least one sequence"),
        ("seq1f1b", {"n": 0}, "at least one subsequence"),
        ("seq1f1b", {"tokens": 0}, "each of at least one token"),
    ],
)
def test_a_request_that_cannot_be_served_says_what_to_change(name, rest, message):
    request = {"p": 2, "n": 1, "m": 2, **rest}
    with pytest.raises(ValueError, match=message):
        make(name, **request)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 8), st.integers(0, 12))
def test_groups_have_a_unit_for_every_rank_and_long_sequences_stay_alone(counts, ranks, short):
    lengths = tuple((1,) * count for count in counts)
    groups = sequence_groups(lengths, num_ranks=ranks)
    assert [index for group in groups for index in group] == list(range(len(counts)))
    if sum(counts) >= ranks:
        assert all(sum(counts[index] for index in group) >= ranks for group in groups)
    long = ((1,) * ranks,) * 5
    groups = sequence_groups((*long, *((1,),) * short), num_ranks=ranks)
    assert groups[:4] == [range(index, index + 1) for index in range(4)]
