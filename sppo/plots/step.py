"""Plot of a step of samples: its chunks, and the placement of their activations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sppo.activations.tensor_classes import ATTENTION
from sppo.cost.stage_cost import row_bytes_of
from sppo.output_file import write_figure
from sppo.planning.elastic.step_plan import StepPlan
from sppo.plots.frame import BLUE, INK, SMALL_PT, clean_axes, new_figure, write_title
from sppo.units import counted, format_count, format_duration

_KINDS = {"split": BLUE, "hybrid": "#7a4fa3", "batched": "#d98a1f"}
_LEVELS = {
    "retained": "#2f7d4f",
    "offloaded": "#4d9fd6",
    "linear recomputed": "#f0b429",
    "attention recomputed": "#c23b3b",
}
_BAND = "#f1f3f5"
_CELL = 24
"""Image rows of one cell (stage and chunk) in the plot of levels, divided among its levels."""
_NAMED_SEQUENCES = 24
"""Largest number of sequences that are all numbered; of more, some are."""
_STAGE_TICKS = 16

# Fractions of the figure: left edge, bottom edge, width, height.
_CHUNKS_AREA = (0.075, 0.505, 0.875, 0.295)
_LEVELS_AREA = (0.075, 0.09, 0.875, 0.275)


def step_plot(plan: StepPlan, path: Path, *, source: str) -> None:
    """Draw a step into `path`, a PNG of 1600 by 1120 pixels.

    Top: the tokens of each chunk, sequence by sequence. Below: the share of saved tensors at each
    level, by chunk and stage.

    Args:
        plan: Plan of the step on one replica.
        path: File to write.
        source: Name of the data that the samples come from.

    Raises:
        OSError: The file cannot be written.
    """
    figure = new_figure(height_inches=7)
    _draw_chunks(figure.add_axes(_CHUNKS_AREA), plan)
    _draw_levels(figure.add_axes(_LEVELS_AREA), plan)
    facts = _facts(plan, source=source)
    write_title(figure, "A step of one replica", *facts, left=_CHUNKS_AREA[0])
    write_figure(path, figure)


def level_shares(plan: StepPlan) -> npt.NDArray[np.float64]:
    """Return the share of each level in the saved bytes of a unit, [stages, units, levels].

    The levels are retained, offloaded, recomputed except attention, and attention recomputed.
    """
    placement = plan.evaluated.placement
    row_bytes = row_bytes_of(plan.evaluated.candidate)[:, None, :]
    retained, offloaded, recomputed = (
        (table * row_bytes).sum(axis=2)
        for table in (placement.retained, placement.offloaded, placement.recomputed)
    )
    attention = (placement.recomputed * row_bytes)[:, :, ATTENTION]
    levels = np.stack([retained, offloaded, recomputed - attention, attention], axis=2)
    shares: npt.NDArray[np.float64] = levels / levels.sum(axis=2, keepdims=True)
    return shares


def _draw_chunks(axes: Any, plan: StepPlan) -> None:
    """Draw a bar for each chunk, as high as its tokens, on the numbered bands of the sequences."""
    chunks, firsts = plan.evaluated.candidate.lengths, _first_chunks(plan)
    for begin, end in zip(firsts[:-1:2], firsts[1::2], strict=False):
        axes.axvspan(begin - 0.5, end - 0.5, color=_BAND, lw=0, zorder=0)
    bars = axes.bar(range(len(chunks)), chunks, width=0.84, lw=0)
    for bar, kind in zip(bars, plan.kinds, strict=True):
        bar.set_color(_KINDS[kind])
    title = "tokens of each chunk; a band is a sequence: a long sample and what fills its tail"
    clean_axes(axes, title, xlabel="sequence")
    axes.set_xlim(-0.5, len(chunks) - 0.5)
    count = len(firsts) - 1
    named = range(0, count, -(-count // _NAMED_SEQUENCES))
    middles = [(firsts[number] + firsts[number + 1] - 1) / 2 for number in named]
    axes.set_xticks(middles, [str(number) for number in named])
    axes.set_ylim(0, max(chunks) * 1.12)
    axes.yaxis.set_major_formatter(lambda tokens, _: format_count(tokens))
    _show_colours(axes, {kind: _KINDS[kind] for kind in _KINDS if kind in plan.kinds})


def _draw_levels(axes: Any, plan: StepPlan) -> None:
    """Draw a cell for each stage and chunk, divided among its levels."""
    from matplotlib.colors import to_rgb

    shares = level_shares(plan)
    stages, units, levels = shares.shape
    colours = np.array([to_rgb(colour) for colour in _LEVELS.values()])
    points = (np.arange(_CELL) + 0.5) / _CELL
    beyond = points[:, None] > np.cumsum(shares, axis=2)[:, :, None, :]
    level = beyond.sum(axis=3).clip(0, levels - 1)  # [stages, units, cell]
    image = colours[level].transpose(0, 2, 1, 3).reshape(stages * _CELL, units, 3)
    extent = (-0.5, units - 0.5, stages - 0.5, -0.5)
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=extent)
    for stage in range(1, stages):
        axes.axhline(stage - 0.5, color="white", lw=1.2 if stages <= _STAGE_TICKS else 0.5)
    for first in _first_chunks(plan)[1:-1]:
        axes.axvline(first - 0.5, color="white", lw=1.6 if units <= 200 else 0.6)
    clean_axes(
        axes,
        "what becomes of saved tensors, in bytes",
        xlabel="chunk, in the order of the forwards",
        grid=None,
    )
    axes.set_yticks(range(0, stages, -(-stages // _STAGE_TICKS)))
    axes.set_ylabel("stage", color=INK, fontsize=SMALL_PT)
    _show_colours(axes, _LEVELS)


def _show_colours(axes: Any, colours: dict[str, str]) -> None:
    """Name colours in a line above the right end of axes."""
    from matplotlib.patches import Patch

    axes.legend(
        handles=[Patch(color=colour, label=name) for name, colour in colours.items()],
        loc="lower right",
        bbox_to_anchor=(1.005, 1.0),
        ncols=len(colours),
        fontsize=SMALL_PT,
        frameon=False,
        handlelength=1.2,
        columnspacing=1.2,
    )


def _first_chunks(plan: StepPlan) -> list[int]:
    """Return the index of the first chunk of each sequence, and the number of chunks."""
    return [*accumulate((len(sequence.lengths) for sequence in plan.sequences), initial=0)]


def _facts(plan: StepPlan, *, source: str) -> tuple[Sequence[str], Sequence[str]]:
    """Return the two lines below the title."""
    candidate = plan.evaluated.candidate
    return (
        (
            f"{plan.num_samples} samples of {source}",
            f"{format_count(plan.tokens)} tokens",
            f"{counted(len(candidate.lengths), 'chunk')} in "
            f"{counted(len(plan.sequences), 'sequence')}",
        ),
        (
            candidate.schedule,
            f"{counted(candidate.num_stages, 'stage')} on "
            f"{counted(candidate.pipeline_parallel_degree, 'rank')}",
            f"{format_duration(plan.step_s)}, bubble {plan.bubble_fraction:.1%} (simulated)",
        ),
    )
