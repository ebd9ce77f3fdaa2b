"""Plot of a machine's measured rates: kernels, copies, and copies that overlap with compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from sppo.bench.report.attention_plot import draw_attention, draw_backends
from sppo.bench.report.copy_plot import draw_copies, draw_overlap
from sppo.bench.report.figures import flops_unit
from sppo.bench.report.panels import (
    COLOURS,
    GRID,
    INK,
    Label,
    clean,
    coloured_dtypes,
    token_axis,
    write_labels,
)
from sppo.bench.suite import Measurements
from sppo.hardware.rates import ElementwisePoint, GemmPoint
from sppo.output_file import write_figure
from sppo.units import format_count

_TITLE_PT = 15
_PANEL_INCHES = (5.2, 5.4)
_MOST_COLUMNS = 3


def write_plot(path: Path, *, name: str, measurements: Measurements) -> None:
    """Draw one panel per subject and write the plot to ``path`` as PNG.

    Args:
        path: File to write.
        name: Name of the machine.
        measurements: Measurements of at least one subject.

    Raises:
        OSError: A file that cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: list[Callable[[Any], None]] = []
    if measurements.gemm:
        panels.append(partial(_draw_gemm, points=measurements.gemm))
    if measurements.attention:
        panels.append(partial(draw_attention, points=measurements.attention))
    if measurements.backends is not None:
        panels.append(partial(draw_backends, found=measurements.backends))
    if measurements.elementwise:
        panels.append(partial(_draw_elementwise, points=measurements.elementwise))
    panels += [partial(draw_copies, found=found) for found in measurements.copies]
    if measurements.overlap is not None:
        panels.append(partial(draw_overlap, found=measurements.overlap))
    columns = min(len(panels), _MOST_COLUMNS)
    rows = -(-len(panels) // columns)
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * columns + 1, height * rows), dpi=140, facecolor="white")
    FigureCanvasAgg(figure)
    for index, draw in enumerate(panels):
        axes = figure.add_subplot(rows, columns, index + 1)
        draw(axes)
        clean(axes)
    figure.suptitle(
        f"{name}, measured", x=0.01, ha="left", color=INK, fontsize=_TITLE_PT, parse_math=False
    )
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.03 / rows), w_pad=2.5, h_pad=2.5)
    write_figure(path, figure)


def _draw_gemm(axes: Any, *, points: tuple[GemmPoint, ...]) -> None:
    """Draw rate against tokens, a line per dtype and width; output solid, weights dotted."""
    unit, name = flops_unit(point.forward_flops_per_s for point in points)
    axes.set_title(f"linear layers, {name}", loc="left")
    labels = []
    for colour, dtype in coloured_dtypes(points):
        for width in sorted({p.width for p in points if p.dtype == dtype}):
            row = [p for p in points if (p.dtype, p.width) == (dtype, width)]
            tokens = [p.tokens for p in row]
            outputs = [p.forward_flops_per_s / unit for p in row]
            axes.plot(tokens, outputs, color=colour, lw=1.6)
            weights = [p.weight_flops_per_s / unit for p in row]
            axes.plot(tokens, weights, color=colour, lw=1.0, ls=":")
            labels.append(Label(tokens[-1], outputs[-1], f"{dtype}, width {width}", colour))
    token_axis(axes, sorted({p.tokens for p in points}), "tokens; output solid, weights dotted")
    write_labels(axes, labels)


def _draw_elementwise(axes: Any, *, points: tuple[ElementwisePoint, ...]) -> None:
    """Draw the rate at the largest size, a bar per kernel and dtype."""
    largest = max(point.elements for point in points)
    chosen = [point for point in points if point.elements == largest]
    kernels = list(dict.fromkeys(point.kernel for point in chosen))[::-1]
    dtypes = list(dict.fromkeys(point.dtype for point in chosen))
    axes.set_title(f"element-wise kernels, {format_count(largest)} elements, GB/s", loc="left")
    thickness = 0.8 / len(dtypes)
    for point in chosen:
        row = kernels.index(point.kernel)
        place = row + 0.4 - thickness * (dtypes.index(point.dtype) + 0.5)
        colour = COLOURS[dtypes.index(point.dtype)]
        axes.barh(place, point.bytes_per_s / 1e9, height=thickness, color=colour)
    axes.set_yticks(range(len(kernels)), [kernel.replace("_", " ") for kernel in kernels])
    axes.set_xlabel(f"of the bytes they must read and write; {', '.join(dtypes)} from above")
    axes.grid(axis="x", color=GRID, linewidth=0.8)
