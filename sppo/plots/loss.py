"""Plot of a run: loss and its running mean, with the learning rate below."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sppo.output_file import write_figure
from sppo.plots.frame import BLUE, INK, PALE_BLUE, SMALL_PT, clean_axes, new_figure, write_title
from sppo.report.metrics import StepMetrics, read_metrics, read_records
from sppo.report.validation import VALIDATION_FILE, ValidationMetrics
from sppo.units import format_count

_RATE, _BAD = "#c47f2a", "#c0392b"
_OF_SETS = ("#d2691e", "#6a3d9a", "#1b7f5c", "#7a7a7a")
"""Colours of the sets of validations; that many sets are drawn, the first ones."""
_OF_SOURCES = ("#2e8b57", "#8e44ad", "#b5651d", "#148f9c", "#8a8d1e", "#c2185b")
"""Colours of the sources of a mixture; that many sources are drawn, those with most tokens."""

# Fractions of the figure: left edge, bottom edge, width, height.
_LOSS_AREA = (0.07, 0.305, 0.84, 0.51)
_RATE_AREA = (0.07, 0.105, 0.84, 0.095)
_LEGEND_COLUMNS = 5


def loss_plot(metrics_path: Path, png_path: Path, *, terms: str = "") -> None:
    """Draw the run recorded in ``metrics_path`` into ``png_path``, 1600 by 900 pixels.

    The plot shows the loss of each step, its running mean, its last value as a number, a mark at
    every skipped step, and the learning rate in a strip below; of a mixture also the running mean
    of the loss of each source, and of validations a point for each set. The title is the name of
    the run's directory.

    Args:
        metrics_path: Path of the run's ``metrics.jsonl``.
        png_path: Path of the file to write.
        terms: Names of the terms that the loss has beside the cross entropy; "" for none.

    Raises:
        ValueError: ``metrics_path`` is missing or holds no step.
        OSError: ``png_path`` cannot be written.
    """
    steps = read_metrics(metrics_path)
    if not steps:
        raise ValueError(f"{metrics_path} holds no step yet; train at least one")
    figure = new_figure()
    loss_axes = figure.add_axes(_LOSS_AREA)
    validations = read_records(metrics_path.with_name(VALIDATION_FILE), ValidationMetrics)
    _draw_loss(loss_axes, steps, validations, terms=terms)
    _draw_rate(figure.add_axes(_RATE_AREA, sharex=loss_axes), steps)
    _title(figure, steps, name=metrics_path.absolute().parent.name)
    write_figure(png_path, figure)


def running_mean(values: Sequence[float], *, window: int) -> NDArray[np.float64]:
    """Return the mean of the finite values in a window around each value, [len(values)].

    The window has ``window`` values, fewer at the ends. It is centred, because a mean of past
    values lags behind a falling loss. The mean is NaN if the window has no finite value.
    """
    array = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(array)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, array, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    middle = np.arange(len(array))
    begins = np.maximum(middle - window // 2, 0)
    ends = np.minimum(middle + (window + 1) // 2, len(array))
    total, count = sums[ends] - sums[begins], counts[ends] - counts[begins]
    means = np.full(len(array), np.nan)
    np.divide(total, count, out=means, where=count > 0)
    return means


def _draw_loss(
    axes: Any,
    steps: Sequence[StepMetrics],
    validations: Sequence[ValidationMetrics],
    *,
    terms: str,
) -> None:
    numbers, losses = [m.step for m in steps], [m.loss for m in steps]
    window = max(5, len(steps) // 25)
    mark = "o" if len(steps) <= 40 else ""
    axes.plot(
        numbers, losses, color=PALE_BLUE, linewidth=1.1, marker=mark, markersize=3, label="loss"
    )
    if len(steps) > window:
        mean = running_mean(losses, window=window)
        axes.plot(numbers, mean, color=BLUE, linewidth=2.2, label=f"mean of {window} steps")
    _draw_sources(axes, steps, window=window)
    _draw_validations(axes, validations)
    _mark_skipped(axes, [m.step for m in steps if m.skipped])
    _annotate_last(axes, steps)
    what = f"cross entropy with {terms}" if terms else "loss"
    clean_axes(axes, f"{what}, nats per token")
    axes.tick_params(labelbottom=False)
    axes.set_xlim(*_limits([*(record.step for record in validations[:1]), *numbers]))
    axes.margins(y=0.08)
    axes.legend(
        loc="upper right",
        bbox_to_anchor=(1, 0),  # below the axes, where it hides no curve
        ncols=_LEGEND_COLUMNS,
        fontsize=SMALL_PT,
        labelcolor=INK,
        frameon=False,
    )


def _draw_sources(axes: Any, steps: Sequence[StepMetrics], *, window: int) -> None:
    """Draw the running mean of the loss of each source of a mixture."""
    numbers, tokens = [m.step for m in steps], Counter[str]()
    for step in steps:
        tokens.update({name: own.tokens for name, own in (step.sources or {}).items()})
    for (name, _), colour in zip(tokens.most_common(), _OF_SOURCES, strict=False):
        own = [(step.sources or {}).get(name) for step in steps]
        losses = [math.nan if source is None else source.loss for source in own]
        mean = running_mean(losses, window=window)
        axes.plot(numbers, mean, color=colour, linewidth=1.2, label=f"{name}, mean")


def _draw_validations(axes: Any, validations: Sequence[ValidationMetrics]) -> None:
    """Draw a point for the loss of each set in each validation."""
    names = dict.fromkeys(record.set for record in validations)
    for name, colour in zip(names, _OF_SETS, strict=False):
        own = [(record.step, record.loss) for record in validations if record.set == name]
        steps, losses = zip(*own, strict=True)
        axes.plot(
            *(steps, losses, "o-"),
            color=colour,
            linewidth=0.8,
            markersize=5,
            label=f"validation, {name}",
        )


def _limits(numbers: Sequence[int]) -> tuple[float, float]:
    first, last = min(numbers), max(numbers)
    margin = max(0.012 * (last - first), 0.5)
    return first - margin, last + margin


def _mark_skipped(axes: Any, skipped: Sequence[int]) -> None:
    if skipped:
        axes.plot(
            skipped,
            np.full(len(skipped), 0.02),
            "|",
            color=_BAD,
            markersize=9,
            markeredgewidth=1.8,
            transform=axes.get_xaxis_transform(),
            label="update skipped",
        )


def _annotate_last(axes: Any, steps: Sequence[StepMetrics]) -> None:
    last = next((m for m in reversed(steps) if math.isfinite(m.loss)), None)
    if last is None:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no finite loss", transform=axes.transAxes, ha="center", color=_BAD)
        return
    axes.plot([last.step], [last.loss], "o", color=BLUE, markersize=6, zorder=5, clip_on=False)
    axes.annotate(
        f"{last.loss:.3f}",
        (last.step, last.loss),
        xytext=(9, 0),
        textcoords="offset points",
        va="center",
        color=BLUE,
        fontsize=13,
        fontweight="bold",
        annotation_clip=False,
    )


def _draw_rate(axes: Any, steps: Sequence[StepMetrics]) -> None:
    from matplotlib.ticker import MaxNLocator

    numbers, rates = [m.step for m in steps], [m.lr for m in steps]
    peak = max((rate for rate in rates if math.isfinite(rate)), default=0.0)
    axes.fill_between(numbers, rates, color=_RATE, alpha=0.12, linewidth=0)
    axes.plot(numbers, rates, color=_RATE, linewidth=1.4)
    axes.set_ylim(0, peak * 1.08 or 1)
    axes.set_yticks([0, peak] if peak else [0])
    axes.set_yticklabels(["0", f"{peak:.2g}"] if peak else ["0"])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10], integer=True))
    clean_axes(axes, "learning rate", xlabel="step", has_grid=False, colour=_RATE)


def _title(figure: Any, steps: Sequence[StepMetrics], *, name: str) -> None:
    finite = [m.loss for m in steps if math.isfinite(m.loss)]
    tokens = sum(m.tokens for m in steps)
    facts = [f"{len(steps)} step{'s' * (len(steps) > 1)}", f"{format_count(tokens)} tokens"]
    if len(finite) >= 10:
        first, last = np.mean(finite[:5]), np.mean(finite[-5:])
        facts.append(f"loss {first:.2f} → {last:.2f} (means of the first and last five steps)")
    write_title(figure, name, facts, left=_LOSS_AREA[0])
