"""Figures and picture of the load of experts."""

import math

import numpy as np
import pytest
from matplotlib.axes import Axes

from sppo.plots.experts import experts_plot
from sppo.report.expert_load import expert_metrics
from sppo.report.tracking.records import record_of_step

LOADS = np.array([[0, 0, 0, 0], [5, 5, 5, 5], [20, 0, 0, 0], [10, 10, 0, 0]], dtype=np.float64)


def test_figures_are_of_the_layers_that_counted_loads():
    found = expert_metrics(LOADS)
    assert found.largest == pytest.approx([1, 4, 2])
    assert found.entropy == pytest.approx([1, 0, math.log(2) / math.log(4)])
    assert expert_metrics(LOADS[:1]) is None
    assert expert_metrics(LOADS[1:2, :1]).entropy == [1]


def test_trackers_get_the_most_uneven_layer():
    record = record_of_step({"step": 3, "experts": {"largest": [1, 4], "entropy": [0.9, 0.2]}})
    assert record.values["experts/largest"] == 4
    assert record.values["experts/entropy"] == 0.2


def test_the_picture_has_a_row_for_every_layer_that_counted_loads(tmp_path, monkeypatch):
    drawn, imshow = [], Axes.imshow

    def recorded(self, table, **options):
        drawn.append(table)
        return imshow(self, table, **options)

    monkeypatch.setattr(Axes, "imshow", recorded)
    experts_plot(tmp_path / "experts.png", loads=LOADS, steps=2)
    assert (tmp_path / "experts.png").stat().st_size > 0
    assert drawn[0].tolist() == [[1, 1, 1, 1], [4, 0, 0, 0], [2, 2, 0, 0]]
