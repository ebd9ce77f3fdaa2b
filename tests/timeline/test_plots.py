"""Plots hold what they must: every bar, idle time by cause, both phases of MSP, a legend."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sppo.plots import timeline as png
from sppo.plots.timeline import binary_step, write_png
from sppo.schedule.abstract import AbstractCase, abstract_case
from sppo.schedule.actions import ActionKind
from sppo.schedule.generate import generate
from sppo.schedule.simulation.simulate import simulate
from sppo.timeline import style
from sppo.timeline.chrome_trace import write_trace
from sppo.units import GIB, MIB
from tests.schedule.cases import make, play
from tests.schedule.transfers.test_kv_placement import program


def offloaded():
    case = abstract_case(
        AbstractCase(
            schedule="seq1f1b",
            ranks=2,
            sequences=2,
            subsequences=3,
            latency=0.5,
            offload_ratio="full",
            d2h=1.5,
            h2d=2.0,
        )
    )
    return simulate(case.schedule, costs=case.costs)


def pixels(path):
    from matplotlib.image import imread

    image = (imread(path)[:, :, :3] * 255).round().astype(int)
    return {tuple(colour) for row in image[::3] for colour in row}


def rgb(colour):
    return tuple(int(colour[k : k + 2], 16) for k in (1, 3, 5))


def test_a_plot_shows_each_kind_and_each_cause_of_idle_time(tmp_path):
    path = tmp_path / "a.png"
    write_png(path, timelines=[offloaded()])
    seen = pixels(path)
    for kind in (ActionKind.F, ActionKind.B, ActionKind.D2H, ActionKind.H2D):
        assert rgb(style.KIND_COLOURS[kind]) in seen
    for colour in style.IDLE_COLOURS.values():
        assert rgb(colour) in seen


def with_kv_copies(copy_s):
    schedule, costs = program(v=3, n=4, leaving=(0, 1), copy_s=copy_s, saved_s=0.25)
    return simulate(schedule, costs=costs)


@pytest.mark.parametrize("copy_s", [0.5, 0.001])
def test_copies_of_keys_have_their_colours_however_short_they_are(tmp_path, copy_s):
    path = tmp_path / "a.png"
    write_png(path, timelines=[with_kv_copies(copy_s)])
    seen = pixels(path)
    for kind in (ActionKind.D2H, ActionKind.H2D):
        assert rgb(style.KIND_COLOURS[kind]) in seen
        assert rgb(style.OTHER_COPY_COLOURS[kind, "kv"]) in seen
    # Those of another plot are not in its legend.
    write_png(path, timelines=[offloaded()])
    assert not {rgb(colour) for colour in style.OTHER_COPY_COLOURS.values()} & pixels(path)


def test_copies_of_keys_have_their_name_in_a_trace(tmp_path):
    timeline = with_kv_copies(0.5)
    write_trace(tmp_path / "a.json", timelines=[timeline])
    trace = (tmp_path / "a.json").read_text()
    for name in ("K and V out", "K and V back", "copy out", "copy back"):
        assert f'"kind":"{name}"' in trace


def test_both_phases_of_msp_have_their_colours(tmp_path):
    path = tmp_path / "a.png"
    cut, plain = make("sppo_msp", p=4, n=8, m=1), make("sppo", p=4, n=8, m=1)
    write_png(path, timelines=[play(plain), play(cut)])
    seen = pixels(path)
    assert {rgb(colour) for colour in style.PHASE_COLOURS.values()} <= seen
    write_png(path, timelines=[play(plain)])
    assert not {rgb(colour) for colour in style.PHASE_COLOURS.values()} & pixels(path)


def test_shards_of_msp_have_a_mark_and_are_counted_as_parts(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(png, "write_figure", lambda path, figure, dpi: figures.append(figure))
    timeline = play(make("sppo_msp", p=4, n=8, m=1))
    png.write_png(tmp_path / "a.png", timelines=[timeline])
    (legend,) = figures[0].legends
    of_shards = [text.get_text().startswith("shard of stage 1") for text in legend.get_texts()]
    markers = [getattr(mark, "get_marker", lambda: None)() for mark in legend.legend_handles]
    assert [marker == "$s1$" for marker in markers] == of_shards
    assert any(of_shards)
    assert style.title(timeline, is_abstract=True).endswith(
        "at most 8.4 units in flight, shards counted in part"
    )


def test_a_step_of_too_many_bars_is_painted(tmp_path):
    path = tmp_path / "a.png"
    write_png(path, timelines=[play(make("interleaved_seq1f1b", p=8, v=2, n=8, m=64))])
    seen = pixels(path)
    kinds = (style.KIND_COLOURS[ActionKind.F], style.SECOND_COLOURS[ActionKind.B])
    assert {rgb(colour) for colour in (*kinds, style.IDLE_COLOURS["bubble"])} <= seen


def test_an_empty_evaluation_and_a_single_rank_can_be_drawn(tmp_path):
    path = tmp_path / "a.png"
    write_png(path, timelines=[play(make("sppo", p=1, n=1, m=1, forward_only=True))])
    assert path.stat().st_size > 5000


def test_sequences_that_differ_alternate_between_dark_and_light():
    packed = generate("sppo", num_ranks=2, lengths=((8, 4), (9,), (3,)))
    colours = {
        action.sequence: style.colour_of(action, schedule=packed, phases={})
        for action in packed.programs[0]
        if action.kind is ActionKind.B
    }
    dark, light = style.KIND_COLOURS[ActionKind.B], style.SECOND_COLOURS[ActionKind.B]
    assert colours == {0: dark, 1: light, 2: dark}
    assert style.shades(packed) == "every 2nd sequence"
    assert style.shades(make("sppo", p=2, n=3, m=2)) is None
    looped = generate("looped_bfs", num_ranks=2, lengths=((8, 4),), num_virtual=2)
    assert style.shades(looped) == "every 2nd stage of a rank"


def test_labels_name_the_unit_and_no_more():
    one, many = make("sppo", p=2, n=3, m=1), make("seq1f1b", p=2, n=3, m=2)
    whole = make("1f1b", p=2, n=1, m=3)
    assert style.unit_label(one.programs[0][1], schedule=one) == "1"
    assert style.unit_label(many.programs[0][1], schedule=many) == "0.1"
    assert style.unit_label(whole.programs[0][1], schedule=whole) == "1"
    assert style.unit_label(one.programs[0][-1], schedule=one) == ""


@pytest.mark.parametrize(
    ("peak", "step"), [(MIB, MIB // 2), (75 * MIB, 32 * MIB), (58 * GIB, 32 * GIB)]
)
def test_memory_is_marked_at_round_binary_sizes(peak, step):
    assert binary_step(peak) == step


def test_a_title_says_what_is_shown():
    title = style.title(play(make("interleaved_seq1f1b", p=2, v=2, n=3, m=2)), is_abstract=True)
    assert title.startswith("interleaved_seq1f1b: 2 ranks, 4 stages, 2 sequences of 3 subsequences")
    assert "simulated step 39 ·" in title
    assert "simulated step 39.00 s ·" in style.title(
        play(make("interleaved_seq1f1b", p=2, v=2, n=3, m=2)), is_abstract=False
    )
    ragged = replace(make("sppo", p=1, n=2, m=1), lengths=((1, 1),))
    assert "1 rank, 1 sequence of 2 subsequences" in style.title(play(ragged), is_abstract=True)


def test_a_trace_is_json_with_spans_idle_time_and_memory(tmp_path):
    path = tmp_path / "a.json"
    timeline = offloaded()
    write_trace(path, timelines=[timeline, timeline])
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    spans = [e for e in events if e["ph"] == "X" and e["pid"] == 0 and e["cat"] == "compute"]
    expected = [s for s in timeline.spans(0) if s.lane == "compute"]
    assert [(e["name"], e["ts"], e["dur"]) for e in spans] == [
        (str(s.action), s.start_s * 1e6, pytest.approx((s.finish_s - s.start_s) * 1e6))
        for s in expected
    ]
    assert {e["name"] for e in events if e.get("cat") == "idle"} == set(style.IDLE_NAMES.values())
    counters = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == 0]
    assert max(counters) == timeline.ranks[0].memory["activations"].peak_bytes
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lanes == {"compute", "d2h", "h2d", "link", "reduce", "idle"}
