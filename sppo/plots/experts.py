"""Plot of the load of experts, by layer and expert."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sppo.output_file import write_figure
from sppo.plots.frame import INK, SMALL_PT, clean_axes, new_figure, write_title
from sppo.report.expert_load import Loads, expert_metrics
from sppo.units import counted

# Fractions of the figure: left edge, bottom edge, width, height.
_AREA = (0.07, 0.13, 0.82, 0.66)
_BAR = (0.91, 0.13, 0.015, 0.66)
_COLOURS = "Blues"
_DARKEST = 3.0
"""Load over the mean load of its layer that is drawn in the darkest shade, and all above it."""
_MARKS = 12


def experts_plot(path: Path, *, loads: Loads, steps: int) -> None:
    """Draw the load of every expert over the mean of its layer into `path`, a PNG.

    Each layer with loads is a row and each expert a column.

    Args:
        path: File to write.
        loads: Number of tokens that chose each expert in some steps, by layer.
        steps: Number of these steps.

    Raises:
        OSError: The file cannot be written.
    """
    layers = np.flatnonzero(loads.sum(1))
    of_mean = loads[layers] / loads[layers].mean(1, keepdims=True)
    figure = new_figure()
    axes, bar = figure.add_axes(_AREA), figure.add_axes(_BAR)
    image = axes.imshow(
        of_mean, cmap=_COLOURS, vmin=0, vmax=_DARKEST, aspect="auto", interpolation="nearest"
    )
    shades = figure.colorbar(image, cax=bar, extend="max")
    shades.outline.set_visible(False)
    bar.tick_params(labelsize=SMALL_PT, length=0, labelcolor=INK)
    every = max(1, len(layers) // _MARKS)
    axes.set_yticks(range(0, len(layers), every), [str(layer) for layer in layers[::every]])
    axes.set_xticks(range(0, loads.shape[1], max(1, loads.shape[1] // _MARKS)))
    clean_axes(
        axes,
        "tokens that chose the expert over the mean of its layer, by layer",
        xlabel="expert",
        has_grid=False,
    )
    axes.spines["bottom"].set_visible(False)
    write_title(figure, "Load of experts", _facts(loads, steps=steps), left=_AREA[0])
    write_figure(path, figure)


def _facts(loads: Loads, *, steps: int) -> list[str]:
    metrics = expert_metrics(loads)
    assert metrics is not None, "only drawn if a layer counted loads"
    idle = int((loads[loads.sum(1) > 0] == 0).sum())
    return [
        counted(steps, "step"),
        f"most chosen expert {max(metrics.largest):.2f} times the mean of its layer",
        f"least entropy of a layer {min(metrics.entropy):.3f} of that of equal loads",
        f"{counted(idle, 'expert')} without tokens",
    ]
