"""Packings of samples that are compared: each has every token once; the memory of each side."""

from dataclasses import replace

from experiments import packing_sides as sides
from experiments import sample_packings as packings
from experiments.packings import MODEL
from sppo.hardware.presets import PRESETS

LENGTHS = (300, 40, 700, 60, 10)


def request_of(*lengths, longest):
    laptop = PRESETS["laptop-cpu"]
    return sides.Request(MODEL, "fp32", laptop, 1 << 30, lengths, longest, longest, None)


def tokens_of(packing):
    """Every token of every sample that a packing has, in order."""
    return sorted(
        (piece.sample, position)
        for pieces in packing.pieces
        for piece in pieces
        for position in range(piece.begin, piece.end)
    )


def figures_of(steps, request):
    return sides.figures([step.plan for step in steps], request.lengths)


def test_sides_are_planned_for_the_same_tokens():
    request = request_of(LENGTHS, LENGTHS[:3], longest=1024)
    names = (*sides.PACKINGS, *sides.ELASTIC)
    found = sides.side_steps(request, ranks=2, sides=names)
    figures = {name: figures_of(steps, request) for name, steps in found.items()}
    for name, steps in found.items():
        assert tokens_of(steps[0].packing) == every_token()
        padding = 5 * 700 - sum(LENGTHS) if name == "padded" else 0
        assert figures[name]["padding_tokens"][0] == padding
    assert {*figures["elastic"]["schedules"]} == {"sppo"}
    assert figures["elastic_auto"]["virtual_stages"] > 1
    for name in sides.ELASTIC:
        assert figures[name]["held_bytes"] <= figures["fixed"]["held_bytes"]
    assert figures["padded"]["tokens_per_s"] < figures["fixed"]["tokens_per_s"]
    assert figures["elastic"]["tokens_per_s"] >= 0.98 * figures["fixed"]["tokens_per_s"]
    asked = sides.side_steps(replace(request, chunk_tokens=512), ranks=2, sides=["fixed"])["fixed"]
    assert asked[0].plan.evaluated.candidate.lengths == (410, 512, 188)


def every_token():
    return [(sample, at) for sample, tokens in enumerate(LENGTHS) for at in range(tokens)]


def test_rows_of_the_stream_cut_samples():
    found = packings.stream(LENGTHS, chunk_tokens=256, row_tokens=400)
    assert [sequence.samples for sequence in found.sequences] == [
        (300, 40, 60),
        (400,),
        (240, 60, 10),
    ]
    assert [sequence.lengths for sequence in found.sequences] == [(256, 144), (256, 144), (256, 54)]
    assert tokens_of(found) == every_token()


def test_fixed_chunks_split_long_samples_and_pack_short_ones_first_fit():
    found = packings.fixed_chunks(LENGTHS, chunk_tokens=64)
    assert [sequence.samples for sequence in found.sequences] == [(300,), (40, 10), (700,), (60,)]
    assert found.sequences[0].lengths == (64, 64, 64, 64, 44)
    assert tokens_of(found) == every_token()
