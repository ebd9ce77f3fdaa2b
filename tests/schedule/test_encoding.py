from __future__ import annotations

from sppo.schedule.encoding import D2H, H2D, REDUCE, B, EncodedProgram, F, decode

LENGTHS = ((4, 4),)


def test_inserted_actions_stand_before_the_action_at_their_position():
    program = EncodedProgram.of_whole_units([F, F, B, B], [0, 1, 1, 0])
    changed = program.insert(
        ([1, 2], EncodedProgram.of_whole_units(D2H, [0, 1])),
        ([2, 1], EncodedProgram.of_whole_units(H2D, [1, 0])),
        ([4], EncodedProgram.of_whole_units(REDUCE, [0])),
    )
    assert [str(action) for action in decode(changed, lengths=LENGTHS)] == [
        "0F0.0", "0D2H0.0", "0H2D0.0", "0F0.1", "0D2H0.1", "0H2D0.1", "0B0.1", "0B0.0", "0REDUCE",
    ]  # fmt: skip
