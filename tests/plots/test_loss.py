"""Plot of the loss of a run."""

import math
from unittest import mock

import numpy as np
import pytest

from sppo.plots.loss import loss_plot, running_mean
from sppo.report.metrics import JsonlSink, SourceMetrics
from tests.report.test_metrics import _metrics


@pytest.mark.parametrize(
    "losses", [[2.0], [math.nan] * 3, [5.0 / (i + 1) for i in range(60)], [3.0, math.inf, 2.0]]
)
def test_a_plot_of_any_run(tmp_path, losses):
    directory = tmp_path / "$name_with_$signs"
    directory.mkdir()
    sink = JsonlSink(directory / "metrics.jsonl", resume_step=0)
    for step, loss in enumerate(losses, start=1):
        sink.write(_metrics(step, loss=loss, skipped=not math.isfinite(loss)))
    sink.close()
    png = tmp_path / "loss.png"
    loss_plot(directory / "metrics.jsonl", png)
    header = png.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(header[16:20]), int.from_bytes(header[20:24])) == (1600, 900)


def test_a_plot_has_a_curve_for_each_of_the_largest_sources(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl", resume_step=0)
    for step in range(1, 9):
        sources = {f"s{i}": SourceMetrics(100 - i, 9, 3.0 + i / step) for i in range(8)}
        sources["s1"] = SourceMetrics(0, 0, math.nan)
        sink.write(_metrics(step, sources=sources))
    sink.close()
    with mock.patch("sppo.plots.loss.write_figure") as written:
        loss_plot(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    (_, figure), _ = written.call_args
    curves = {line.get_label(): line.get_ydata() for line in figure.axes[0].lines}
    drawn = [f"s{i}, mean" for i in (0, 2, 3, 4, 5, 6)]
    assert [label for label in curves if label.endswith(", mean")] == drawn
    assert curves["s2, mean"][-1] == pytest.approx(np.mean([3 + 2 / n for n in (6, 7, 8)]))


def test_the_legend_covers_no_curve(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl", resume_step=0)
    for step in range(1, 9):
        sources = {"high": SourceMetrics(9, 9, 9.0), "low": SourceMetrics(9, 9, 1.0)}
        sink.write(_metrics(step, loss=2.0, sources=sources))
    sink.close()
    with mock.patch("sppo.plots.loss.write_figure") as written:
        loss_plot(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    (_, figure), _ = written.call_args
    figure.canvas.draw()
    axes = figure.axes[0]
    box = axes.get_legend().get_window_extent()
    assert not any(
        box.contains(*axes.transData.transform(at))
        for line in axes.lines
        for at in line.get_xydata()
    )


def test_no_plot_of_a_run_without_steps(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no step yet"):
        loss_plot(tmp_path / "metrics.jsonl", tmp_path / "loss.png")


def test_running_mean_is_centred_and_passes_over_what_is_not_finite():
    values = [1.0, 2.0, math.nan, 4.0, 5.0]
    assert running_mean(values, window=3) == pytest.approx([1.5, 1.5, 3.0, 4.5, 4.5])
    assert np.isnan(running_mean([math.nan], window=3)).all()
