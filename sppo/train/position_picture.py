"""A picture of loss against position in the context."""

from __future__ import annotations

from pathlib import Path

from sppo.train.evaluation import Evaluation
from sppo.units import format_tokens


def position_picture(result: Evaluation, path: Path) -> None:
    """Write a PNG: one step per bin of positions, on a logarithmic axis.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    edges = [max(row.start, 1) for row in result.by_position] + [result.by_position[-1].end]
    losses = [row.loss for row in result.by_position]
    axes.stairs(losses, edges, baseline=None, linewidth=2, color="#1f5fa8")
    for row, left, right in zip(result.by_position, edges, edges[1:], strict=False):
        axes.annotate(
            f"{row.loss:.3f}",
            ((left * right) ** 0.5, row.loss),
            textcoords="offset points",
            xytext=(0, 6),
            ha="center",
            fontsize=8,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(edges, [format_tokens(edge) for edge in edges])
    axes.minorticks_off()
    axes.set_xlabel("position in the context (tokens)")
    axes.set_ylabel("loss (nats per token)")
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    kind = "held-out" if result.held_out else "training"
    axes.set_title(
        f"Loss by position: {result.loss:.3f} over {result.num_tokens} {kind} tokens, "
        f"step {result.step}",
        loc="left",
        fontsize=11,
    )
    figure.savefig(path, dpi=120)
