"""Plots of evaluations: shares of needles in their cells, and one curve for each validation."""

from __future__ import annotations

import math

import pytest

from sppo.plots import needle, positions
from sppo.plots.needle import needle_plot
from sppo.plots.positions import position_plot
from sppo.training.validation.sums import PositionLoss


@pytest.fixture
def figures(monkeypatch):
    """The figures that plots were written from, instead of files."""
    kept = []
    for module in (needle, positions):
        monkeypatch.setattr(module, "write_figure", lambda path, figure: kept.append(figure))
    return kept


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_needles_are_in_the_cell_of_their_length_and_depth(figures, tmp_path):
    shares = {(8192, 0): 1.0, (4096, 100): 1 / 3, (8192, 100): 0.0}
    needle_plot(tmp_path / "a.png", shares=shares, facts=["12 %"])
    (axes,) = figures[0].axes
    cells = {tuple(map(round, text.get_position())): text.get_text() for text in axes.texts}
    assert cells == {(1, 0): "100", (0, 1): "33", (1, 1): "0"}  # none at 4Ki and 0 %
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4Ki", "8Ki"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0 %", "100 %"]
    light, dark = (axes.images[0].cmap(share)[:3] for share in (0.0, 1.0))
    assert sum(light) > sum(dark)
    colours = {text.get_text(): text.get_color() for text in axes.texts}
    assert colours["100"] == "white" != colours["0"]


def test_facts_stay_on_the_page(figures, tmp_path):
    facts = ["loss 2.521", "perplexity 12.44", "213.0k held-out tokens of data/held_out"]
    weights = "weights of step 30 from runs/a_longer_name/checkpoints/step_000030"
    needle_plot(tmp_path / "a.png", shares={(8192, 0): 1.0}, facts=[*facts, weights])
    _, *lines = figures[0].texts
    assert [line.get_text() for line in lines] == ["  ·  ".join(facts), weights]
    assert all(line.get_window_extent().x1 < figures[0].bbox.x1 for line in lines)


def test_many_depths_have_no_text_that_cannot_be_read(figures, tmp_path):
    shares = {(1024, depth): 1.0 for depth in range(101)}
    needle_plot(tmp_path / "a.png", shares=shares, facts=[])
    assert texts(figures[0].axes[0]) == []
    assert len(figures[0].axes[0].get_yticklabels()) < 20


def test_one_curve_for_each_validation_and_one_panel_for_each_set(figures, tmp_path):
    edges = [(0, 64), (64, 128), (256, 512)]
    curves = {
        f"step {step}": [
            PositionLoss(*own, loss, 9)
            for own, loss in zip(edges, (3.0 - step, math.nan, 2.0 - step), strict=True)
        ]
        for step in range(3)
    }
    panels = {"held_out": curves, "chat": {"step 0": [PositionLoss(0, 64, 1.5, 9)]}}
    position_plot(tmp_path / "a.png", panels, facts=[])
    first, second = figures[0].axes
    assert (first.get_title(loc="left"), second.get_title(loc="left")) == ("held_out", "chat")
    levels = {float(line.get_ydata()[0]) for line in first.lines if len(line.get_ydata()) == 2}
    assert {1.0, 2.0, 3.0, 0.0} <= levels
    assert set(texts(first)) == {"1.000", "0.000", "NaN"}  # of the last validation alone
    assert [label.get_text() for label in first.get_xticklabels()] == ["0", "128", "512"]
    (at,) = (text.xy[0] for text in first.texts if text.get_text() == "0.000")
    assert at == 3.5  # nothing is known of 128 to 256
    position_plot(tmp_path / "a.png", {"held_out": panels["held_out"]}, facts=[])
    legend = figures[1].axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["step 0", "step 2"]
