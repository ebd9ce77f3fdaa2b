"""Shortfall of memory of a step of samples: which sample, which stage, how many bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from sppo.cost.stage_cost import placed_bytes
from sppo.planning.elastic.packing import PADDING, PackedSamples
from sppo.planning.elastic.windows import rank_windows
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.units import format_bytes


def shortfall_text(
    lengths: Sequence[int], short: Sequence[tuple[PackedSamples, EvaluatedCandidate]]
) -> str:
    """Say what a step lacks of which nothing fits.

    Args:
        lengths: tokens of each of its samples.
        short: what was tried; the one that lacks least is spoken of.
    """
    packed, evaluated = min(short, key=lambda one: one[1].short_bytes)
    shortfall = evaluated.shortfall
    assert shortfall is not None, "only called where nothing fits"
    stages = evaluated.candidate.stages_of_rank(shortfall.rank)
    where = f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"
    sample = heaviest_sample(packed, evaluated, rank=shortfall.rank)
    return (
        f"a step of {len(lengths)} samples does not fit: {where} needs "
        f"{format_bytes(shortfall.needed_bytes)} of {shortfall.place} memory and "
        f"{format_bytes(shortfall.available_bytes)} may be used, so it is short by "
        f"{format_bytes(shortfall.short_bytes)} ({shortfall.short_bytes} bytes); most of it is "
        f"{shortfall.bucket.replace('_', ' ')} ({format_bytes(shortfall.bucket_bytes)}), and most "
        f"is held of sample {sample}, of {lengths[sample]} tokens: fewer samples a step, a lower "
        "sequence.length, or activations.policy=auto, with another train.output, would need less"
    )


def heaviest_sample(packed: PackedSamples, evaluated: EvaluatedCandidate, *, rank: int) -> int:
    """Return the sample of whose saved tensors a rank holds most at its fullest moment.

    Args:
        packed: the samples of the step.
        evaluated: its candidate, with a placement.
        rank: of the pipeline.
    """
    candidate, placement = evaluated.candidate, evaluated.placement
    own = rank_windows(candidate)[rank]
    held = placed_bytes(placement.retained, recomputed=placement.recomputed, candidate=candidate)
    of_units = held[own.stages, own.units]
    fullest = int(np.argmax(own.holds @ of_units + own.fixed_bytes))
    of_samples: defaultdict[int, float] = defaultdict(float)
    for unit, parts in enumerate(_parts_of_units(packed)):
        unit_bytes = float(of_units[(own.units == unit) & own.holds[fullest]].sum())
        for sample, tokens in parts:
            of_samples[sample] += unit_bytes * tokens / candidate.lengths[unit]
    of_samples.pop(PADDING, None)
    return max(sorted(of_samples), key=lambda sample: of_samples[sample])


def _parts_of_units(packed: PackedSamples) -> list[list[tuple[int, int]]]:
    """Return the samples of each subsequence, with the tokens that it has of each."""
    found = []
    for sequence, samples in zip(packed.sequences, packed.samples, strict=True):
        place = 0
        for parts in sequence.parts():
            of_unit = []
            for begin, end in parts:
                of_unit.append((samples[place], end - begin))
                place += end == sequence.samples[place]
            found.append(of_unit)
    return found
