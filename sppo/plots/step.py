"""Plot of a step of samples: lengths of samples, chunks, and placement of activations."""

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
from sppo.planning.elastic.packing import PADDING
from sppo.planning.elastic.step_plan import StepPlan
from sppo.plots.frame import (
    BLUE,
    INK,
    ORANGE,
    QUIET,
    SMALL_PT,
    clean_axes,
    new_figure,
    show_legend,
    show_lengths,
    show_shares,
    write_title,
)
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
_LENGTHS_AREA = (0.075, 0.645, 0.875, 0.225)
_CHUNKS_AREA = (0.075, 0.375, 0.875, 0.19)
_LEVELS_AREA = (0.075, 0.065, 0.875, 0.215)


def step_plot(plan: StepPlan, path: Path, *, source: str) -> None:
    """Draw a step into `path`, a PNG of 1600 by 1440 pixels.

    Top: the lengths of its samples, with the chunks above. Middle: the tokens of each chunk,
    sequence by sequence. Bottom: the share of saved tensors at each level, by chunk and stage.

    Args:
        plan: Plan of the step on one replica.
        path: File to write.
        source: Name of the data that the samples come from.

    Raises:
        OSError: The file cannot be written.
    """
    figure = new_figure(height_inches=9)
    _draw_lengths(figure.add_axes(_LENGTHS_AREA), plan)
    _draw_chunks(figure.add_axes(_CHUNKS_AREA), plan)
    _draw_levels(figure.add_axes(_LEVELS_AREA), plan)
    facts = _facts(plan, source=source)
    write_title(figure, "A step of one replica", *facts, left=_LENGTHS_AREA[0])
    write_figure(path, figure)


def level_shares(plan: StepPlan) -> npt.NDArray[np.float64]:
    """Return the share of each level in the saved bytes of a unit, [stages, units, levels].

    The levels are retained, offloaded, recomputed except attention, and attention recomputed.
    """
    placement = plan.evaluated.placement
    row_bytes = row_bytes_of(plan.evaluated.candidate)[:, None, :]
    retained, offloaded, recomputed = (
        table * row_bytes
        for table in (placement.retained, placement.offloaded, placement.recomputed)
    )
    attention = recomputed[:, :, ATTENTION]
    levels = np.stack(
        [
            retained.sum(axis=2),
            offloaded.sum(axis=2),
            recomputed.sum(axis=2) - attention,
            attention,
        ],
        axis=2,
    )
    shares: npt.NDArray[np.float64] = levels / levels.sum(axis=2, keepdims=True)
    return shares


def _draw_lengths(axes: Any, plan: StepPlan) -> None:
    """Draw the shares of samples and tokens over the length, and a mark at each chunk's length."""
    lengths = np.sort(_sample_lengths(plan))[::-1]
    samples = np.arange(1, len(lengths) + 1) / len(lengths)
    tokens = np.cumsum(lengths) / lengths.sum()
    for shares, colour, text in (
        (samples, BLUE, "samples at least so long"),
        (tokens, ORANGE, "tokens in samples at least so long"),
    ):
        ends = [int(lengths[0]), *lengths, 1]
        axes.step(ends, [0.0, *shares, 1.0], where="post", color=colour, lw=2, label=text)
    chunks = plan.evaluated.candidate.lengths
    for kind, colour in _KINDS.items():
        own = [size for size, is_of in zip(chunks, plan.kinds, strict=True) if is_of == kind]
        if own:
            text = f"{len(own)} {kind} chunks" if len(own) > 1 else f"1 {kind} chunk"
            axes.vlines(own, 1.04, 1.13, color=colour, lw=1.6, alpha=0.8, label=text)
    clean_axes(
        axes, "how long the samples are, and above it how long the chunks are", xlabel="tokens"
    )
    show_lengths(axes, longest=max(2, int(lengths[0]), *chunks))
    show_shares(axes, top=1.15)
    show_legend(axes, loc="lower left")


def _draw_chunks(axes: Any, plan: StepPlan) -> None:
    """Draw a bar for each chunk, as high as its tokens, on the bands of the sequences."""
    chunks = plan.evaluated.candidate.lengths
    _draw_bands(axes, plan)
    colours = [_KINDS[kind] for kind in plan.kinds]
    axes.bar(np.arange(len(chunks)), chunks, width=0.84, color=colours, lw=0)
    clean_axes(
        axes, "tokens of each chunk; a band is a sequence: a long sample and what fills its tail"
    )
    axes.set_xlim(-0.5, len(chunks) - 0.5)
    axes.set_xticks([])
    axes.set_ylim(0, max(chunks) * 1.12)
    ticks = axes.get_yticks()
    ticks = [tick for tick in ticks if 0 <= tick <= max(chunks) * 1.12]
    axes.set_yticks(ticks, [format_count(tick) for tick in ticks])
    _name_sequences(axes, plan)


def _draw_levels(axes: Any, plan: StepPlan) -> None:
    """Draw a cell for each stage and chunk, divided among its levels."""
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    shares = level_shares(plan)
    stages, units, _ = shares.shape
    colours = np.array([to_rgb(colour) for colour in _LEVELS.values()])
    ends = np.cumsum(shares, axis=2)
    points = (np.arange(_CELL) + 0.5) / _CELL
    level = (
        (points[None, None, :, None] > ends[:, :, None, :]).sum(axis=3).clip(0, len(colours) - 1)
    )
    image = colours[level].transpose(0, 2, 1, 3).reshape(stages * _CELL, units, 3)
    axes.imshow(
        image,
        aspect="auto",
        interpolation="nearest",
        extent=(-0.5, units - 0.5, stages - 0.5, -0.5),
    )
    for stage in range(1, stages):
        axes.axhline(stage - 0.5, color="white", lw=1.2 if stages <= _STAGE_TICKS else 0.5)
    for first in _first_chunks(plan)[1:]:
        axes.axvline(first - 0.5, color="white", lw=1.6 if units <= 200 else 0.6)
    clean_axes(
        axes,
        "what becomes of saved tensors, in bytes",
        xlabel="chunk, in the order of the forwards",
        grid=None,
    )
    every = -(-stages // _STAGE_TICKS)
    axes.set_yticks(range(0, stages, every))
    axes.set_ylabel("stage", color=INK, fontsize=SMALL_PT)
    handles = [Patch(color=colour, label=name) for name, colour in _LEVELS.items()]
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.005, 1.0),
        ncols=len(handles),
        fontsize=SMALL_PT,
        frameon=False,
        handlelength=1.2,
        columnspacing=1.2,
    )


def _draw_bands(axes: Any, plan: StepPlan) -> None:
    """Draw a band behind every other sequence."""
    firsts = [*_first_chunks(plan), len(plan.evaluated.candidate.lengths)]
    for place in range(0, len(firsts) - 1, 2):
        axes.axvspan(firsts[place] - 0.5, firsts[place + 1] - 0.5, color=_BAND, lw=0, zorder=0)


def _name_sequences(axes: Any, plan: StepPlan) -> None:
    """Write the number of each sequence, or of every k-th one, below its chunks."""
    firsts = [*_first_chunks(plan), len(plan.evaluated.candidate.lengths)]
    count = len(firsts) - 1
    every = -(-count // _NAMED_SEQUENCES)
    for place in range(0, count, every):
        middle = (firsts[place] + firsts[place + 1] - 1) / 2
        axes.text(
            middle,
            -0.03,
            str(place),
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="top",
            color=QUIET,
            fontsize=SMALL_PT - 1,
        )
    axes.text(
        0.5,
        -0.13,
        "sequence",
        transform=axes.transAxes,
        ha="center",
        va="top",
        color=INK,
        fontsize=SMALL_PT,
    )


def _first_chunks(plan: StepPlan) -> list[int]:
    """Return the index of the first chunk of each sequence."""
    return [0, *accumulate(len(sequence.lengths) for sequence in plan.sequences[:-1])]


def _sample_lengths(plan: StepPlan) -> npt.NDArray[np.int64]:
    """Return the tokens of each sample, without padding."""
    pairs: list[tuple[int, int]] = []
    for sequence, samples in zip(plan.sequences, plan.packed.samples, strict=True):
        pairs += zip(samples, sequence.samples, strict=True)
    return np.array([tokens for sample, tokens in pairs if sample != PADDING], dtype=np.int64)


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
