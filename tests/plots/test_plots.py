"""Plots hold what they must: every bar, idle time by cause, both phases of MSP, a legend."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sppo.plots import timeline as png
from sppo.plots import timeline_style as style
from sppo.plots.chrome_trace import write_trace
from sppo.plots.timeline import binary_step, write_png
from sppo.schedule.abstract import AbstractCase, abstract_case
from sppo.schedule.actions import ActionKind
from sppo.schedule.generate import generate
from sppo.schedule.simulation.simulate import simulate
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
    """The colours of a picture as numbers."""
    from matplotlib.image import imread

    red, green, blue = (imread(path)[::3, :, :3] * 255).round().astype(int).transpose(2, 0, 1)
    return set(np.unique(red << 16 | green << 8 | blue).tolist())


def rgb(colour):
    return int(colour[1:], 16)


def test_a_plot_shows_each_kind_and_each_cause_of_idle_time(tmp_path):
    path = tmp_path / "a.png"
    write_png(path, timelines=[offloaded()])
    seen = pixels(path)
    for kind in (ActionKind.F, ActionKind.B, ActionKind.D2H, ActionKind.H2D):
        assert rgb(style.KINDS[kind].colour) in seen
    assert {rgb(look.colour) for look in style.IDLE.values()} <= seen


def with_kv_copies(copy_s):
    schedule, costs = program(v=3, n=4, leaving=(0, 1), copy_s=copy_s, saved_s=0.25)
    return simulate(schedule, costs=costs)


@pytest.mark.parametrize("copy_s", [0.5, 0.001])
def test_copies_of_keys_have_their_colours_however_short_they_are(tmp_path, copy_s):
    path = tmp_path / "a.png"
    write_png(path, timelines=[with_kv_copies(copy_s)])
    seen = pixels(path)
    for kind in (ActionKind.D2H, ActionKind.H2D):
        assert rgb(style.KINDS[kind].colour) in seen
        assert rgb(style.OTHER_COPIES[kind, "kv"].colour) in seen
    # Those of another plot are not in its legend.
    write_png(path, timelines=[offloaded()])
    assert not {rgb(look.colour) for look in style.OTHER_COPIES.values()} & pixels(path)


def test_copies_of_keys_have_their_name_in_a_trace(tmp_path):
    timeline = with_kv_copies(0.5)
    write_trace(tmp_path / "a.json", timelines=[timeline])
    trace = (tmp_path / "a.json").read_text()
    for name in ("K and V out", "K and V back", "copy out", "copy back"):
        assert f'"kind":"{name}"' in trace


def test_both_phases_of_msp_have_their_colours(tmp_path):
    path = tmp_path / "a.png"
    cut, plain = make("sppo_msp", p=4, n=8, m=1), make("sppo", p=4, n=8, m=1)
    phases = {rgb(colour) for _, colours in style.PHASES.values() for colour in colours.values()}
    write_png(path, timelines=[play(plain), play(cut)])
    assert phases <= pixels(path)
    write_png(path, timelines=[play(plain)])
    assert not phases & pixels(path)


def test_copies_of_shards_look_like_other_copies():
    words = {"ranks": 4, "sequences": 1, "subsequences": 8, "offload_ratio": "full"}
    schedule = abstract_case(AbstractCase(schedule="sppo_msp", **words)).schedule
    look = style.Style(schedule).look
    copies = [a for program in schedule.programs for a in program if a.kind is ActionKind.D2H]
    assert any(copy.num_shards > 1 for copy in copies)
    assert {look(copy) for copy in copies} == {style.KINDS[ActionKind.D2H]}


def test_the_legend_explains_shards_of_msp_where_there_are_some(monkeypatch):
    names = []

    def read(path, figure, dpi):
        (legend,) = figure.legends
        names.append([text.get_text() for text in legend.get_texts()])

    monkeypatch.setattr(png, "write_figure", read)
    cut, plain = make("sppo_msp", p=4, n=8, m=1), make("sppo", p=4, n=8, m=1)
    for schedule in (cut, plain):
        write_png(Path("a.png"), timelines=[play(schedule)])
    assert [style.SHARD.name in of for of in names] == [True, False]
    assert names[1] == ["forward", "backward", "idle: bubble"]
    assert style.title(play(cut), is_abstract=True).endswith(
        "at most 8.4 units in flight, shards counted in part"
    )


def test_bars_of_less_than_a_pixel_are_drawn(tmp_path):
    path = tmp_path / "a.png"
    write_png(path, timelines=[play(make("interleaved_seq1f1b", p=8, v=2, n=8, m=64))])
    seen = pixels(path)
    drawn = (style.KINDS[ActionKind.F], style.KINDS[ActionKind.B], style.IDLE["bubble"])
    assert {rgb(look.colour) for look in drawn} <= seen


def test_an_empty_evaluation_and_a_single_rank_can_be_drawn(tmp_path):
    path = tmp_path / "a.png"
    write_png(path, timelines=[play(make("sppo", p=1, n=1, m=1, forward_only=True))])
    assert path.stat().st_size > 5000


def test_sequences_that_differ_alternate_between_dark_and_light():
    def names(schedule):
        found = style.Style(schedule)
        return [
            found.look(action).name
            for action in schedule.programs[0]
            if action.kind is ActionKind.F
        ]

    packed = generate("sppo", num_ranks=2, lengths=((8, 4), (9,), (3,)))
    assert names(packed) == ["forward", "forward", "every 2nd sequence", "forward"]
    assert set(names(make("sppo", p=2, n=3, m=2))) == {"forward"}
    looped = generate("looped_bfs", num_ranks=2, lengths=((8, 4),), num_virtual=2)
    assert names(looped) == ["forward"] * 2 + ["every 2nd stage of a rank"] * 2


@pytest.mark.parametrize(
    ("schedule", "place", "label"),
    [
        (make("sppo", p=2, n=3, m=1), 1, "1"),
        (make("seq1f1b", p=2, n=3, m=2), 1, "0.1"),
        (make("1f1b", p=2, n=1, m=3), 1, "1"),
        (make("sppo", p=2, n=3, m=1), -1, ""),
    ],
)
def test_labels_name_the_unit_and_no_more(schedule, place, label):
    assert style.Style(schedule).unit_label(schedule.programs[0][place]) == label


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
    assert {e["name"] for e in events if e.get("cat") == "idle"} == {
        look.name for look in style.IDLE.values()
    }
    counters = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == 0]
    assert max(counters) == timeline.ranks[0].memory["activations"].peak_bytes
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lanes == {"compute", "d2h", "h2d", "link", "reduce", "idle"}
