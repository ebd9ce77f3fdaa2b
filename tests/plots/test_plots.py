"""Plots hold what they must: every bar, idle time by cause, both phases of MSP, a legend."""

import json

import numpy as np
import pytest

from sppo.plots import timeline_style as style
from sppo.plots.chrome_trace import write_trace
from sppo.plots.timeline import write_png
from sppo.schedule.abstract import AbstractCase, abstract_case
from sppo.schedule.actions import ActionKind
from sppo.schedule.simulation.simulate import simulate
from tests.schedule.cases import make, play
from tests.schedule.transfers.test_kv_placement import program


def offloaded():
    schedule, costs = abstract_case(
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
    return simulate(schedule, costs=costs)


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


def test_copies_of_keys_have_their_colours_however_short_they_are(tmp_path):
    path = tmp_path / "a.png"
    schedule, costs = program(v=3, n=4, leaving=(0, 1), copy_s=0.001, saved_s=0.25)
    write_png(path, timelines=[simulate(schedule, costs=costs)])
    seen = pixels(path)
    for kind in (ActionKind.D2H, ActionKind.H2D):
        assert rgb(style.KINDS[kind].colour) in seen
        assert rgb(style.OTHER_COPIES[kind, "kv"].colour) in seen
    # Those of another plot are not in its legend.
    write_png(path, timelines=[offloaded()])
    assert not {rgb(look.colour) for look in style.OTHER_COPIES.values()} & pixels(path)


def test_an_empty_evaluation_and_a_single_rank_can_be_drawn(tmp_path):
    path = tmp_path / "a.png"
    write_png(path, timelines=[play(make("sppo", p=1, n=1, m=1, forward_only=True))])
    assert path.stat().st_size > 5000


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
