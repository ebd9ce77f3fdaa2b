from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.schedule.actions import OPCODES, WHOLE_STAGE_ACTIONS, Action
from sppo.schedule.costs import abstract_costs
from sppo.schedule.program import generate
from sppo.schedule.program_text import (
    ProgramTextError,
    format_program,
    parse_action,
    parse_program,
)
from sppo.schedule.transfers.communication import place_messages
from sppo.schedule.transfers.copies import place_copies
from tests.schedule.cases import SUBSEQUENCE_SCHEDULES, make, play

BY_HAND = """
# Two ranks, one sequence in two subsequences.
name by-hand
lengths 16,16

rank 0: 0F0.0 0F0.1 0B0.1 0B0.0   # the first stage
rank 1: 1F0.0 1F0.1 1B0.1 1B0.0
"""


number = st.integers(0, 99999)


@given(st.sampled_from([*OPCODES]), number, number, number, st.integers(1, 50), st.data())
def test_every_action_is_read_back(name, stage, sequence, subsequence, shards, data):
    kind, wire = name
    action = Action(kind, stage, wire=wire)
    if name not in WHOLE_STAGE_ACTIONS:
        shard = data.draw(st.integers(0, shards - 1))
        action = Action(kind, stage, sequence, subsequence, wire, shard, shards)
    assert parse_action(str(action)) == action


@settings(max_examples=40)
@given(
    st.sampled_from(SUBSEQUENCE_SCHEDULES),
    st.integers(1, 4),
    st.lists(
        st.lists(st.integers(8, 40), min_size=1, max_size=5).map(tuple), min_size=1, max_size=3
    ),
)
def test_every_schedule_is_read_back(name, p, lengths):
    lengths = tuple(lengths)
    units = sum(map(len, lengths))
    costs = replace(abstract_costs(p, num_units=units), context_slope=0.01)
    v = 2 if name.startswith("inter") else 1
    schedule = generate(name, num_ranks=p, num_virtual=v, lengths=lengths, costs=costs)
    everything = np.ones((schedule.num_stages, units), dtype=bool)
    schedule = place_messages(place_copies(schedule, offloaded=everything))
    read = parse_program(format_program(schedule))
    assert read == schedule
    assert read.digest() == schedule.digest()


def test_a_program_by_hand():
    schedule = parse_program(BY_HAND)
    assert schedule.name == "by-hand"
    assert schedule.lengths == ((16, 16),)
    assert play(schedule).makespan_s == 9


def test_bare_lines_are_the_programs_of_ranks_in_order():
    schedule = make("interleaved_seq1f1b", p=2, v=2, n=2, m=2, tokens=1)
    bare = "\n".join(" ".join(map(str, program)) for program in schedule.programs)
    read = parse_program(bare)
    assert (read.programs, read.placement, read.lengths) == (
        schedule.programs, schedule.placement, schedule.lengths,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 0: 0F0.0 0X0.0", "line 1: '0X0.0' is not an action: write stage, kind"),
        ("rank 0: 0F0.0 0R0.0 0B0.0", "line 1: '0R0.0' is not an action: write stage, kind"),
        ("\nrank 0: 0F", "line 2: '0F' is not an action: F names its unit"),
        ("rank 0: 0REDUCE0.0", "REDUCE names only a stage"),
        ("rank 0: 0SEND0.0", "'0SEND0.0' is not an action"),
        ("rank 0: 0F0.0\nrank 0: 0F0.0", "line 2: rank 0 has a program on line 1"),
        ("rank 1: 0F0.0", "each of the ranks 0 to 1"),
        (f"ranks 4\n{BY_HAND}", "programs for 2 of 4 ranks, the last for rank 1: .* ranks 0 to 3"),
        ("ranks 1\n0F0.0\n1F0.0", "programs for 2 of 1 ranks, the last for rank 1"),
        ("ranks 2\nrank 0: 0F0.0\nrank 2: 0F0.0", "programs for 2 of 2 ranks, the last for rank 2"),
        ("ranks 0\n0F0.0", "line 1: ranks 0: must be at least 1"),
        ("lengths x\nrank 0: 0F0.0", "line 1: 'x' is not a whole number"),
        ("lengths 4,0\nrank 0: 0F0.0", "line 1: lengths 0: must be at least 1"),
        ("lengths 4\nrank 0: 0F0.0 0F0.7", "line 2: rank 0, action 2, 0F0.7: sequence 0 has 1 sub"),
        ("speed 3", "line 1: 'speed' starts no line"),
        ("cut 0 1", "line 1: cut '0 1': write stage, unit and tokens"),
        ("cut 0 4.0 = 1,2\nrank 0: 0F0.0", "cut 0 4.0: there is no such unit"),
        ("# nothing", "holds no program"),
        ("rank 0: 0F0.999999999", "names a unit, but not every unit before it"),
        ("rank 0: 999999999F0.0", "1 subsequences on 1 ranks with 1000000000 stages each, and"),
        ("rank 0: 0F0.99999999999", "is not an action"),
        ("rank 0: 99999999999F0.0", "is not an action"),
        ("rank 999999999999: 0F0.0", "the last for rank 999999999999"),
        ("rank 999999999999999: 0F0.0", "too large; write at most 12 digits"),
        (
            "lengths 1,1,1\n0F0.0 0B0.0",
            "3 subsequences on 1 ranks with 1 stages each, and only 2 actions",
        ),
    ],
)
def test_what_cannot_be_read_says_where_and_what_to_write(text, message):
    with pytest.raises(ProgramTextError, match=message):
        parse_program(text, source="mine.txt")


def test_a_wrong_program_gets_its_line_and_the_rule():
    swapped = BY_HAND.replace("1F0.0 1F0.1", "1F0.1 1F0.0")
    with pytest.raises(ProgramTextError) as caught:
        parse_program(swapped, source="mine.txt")
    assert "mine.txt, line 7: rank 1, action 1: 1F0.1 stands before 1F0.0" in str(caught.value)
    assert "(rule: forward order)" in str(caught.value)


def test_a_missing_action_gets_the_line_of_its_rank():
    with pytest.raises(ProgramTextError, match="line 7: rank 1, 1B0.0 is missing"):
        parse_program(BY_HAND.replace(" 1B0.0", ""), source="mine.txt")
