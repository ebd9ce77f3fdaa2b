"""Message on a step of samples that does not fit: which sample, which stage, how many bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from sppo.cost.stage_cost import placed_bytes
from sppo.planning.elastic.packing import PADDING, PackedSamples
from sppo.planning.elastic.windows import rank_windows
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.units import format_bytes

_LISTED_STAGES = 4
"""Most stages that a message lists one by one."""


def shortfall_text(
    lengths: Sequence[int], short: Sequence[tuple[PackedSamples, EvaluatedCandidate]]
) -> str:
    """Return a message on the memory that a step lacks if no packing fits.

    Args:
        lengths: Tokens of each sample of the step.
        short: Packings tried and their candidates; the one that lacks least memory is described.
    """
    packed, evaluated = min(short, key=lambda one: one[1].short_bytes)
    shortfall = evaluated.shortfall
    assert shortfall is not None, "only called where nothing fits"
    stages = evaluated.candidate.stages_of_rank(shortfall.rank)
    where = stages_text(stages)
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


def stages_text(stages: Sequence[int]) -> str:
    """Return ``stage 3``, ``stages 1, 3``, ``stages 0 to 31``, or ``stages 1, 3, ..., 31``."""
    first, last = stages[0], stages[-1]
    if len(stages) == 1:
        return f"stage {first}"
    if len(stages) <= _LISTED_STAGES:
        return f"stages {', '.join(map(str, stages))}"
    if list(stages) == list(range(first, last + 1)):
        return f"stages {first} to {last}"
    return f"stages {first}, {stages[1]}, ..., {last}"


def heaviest_sample(packed: PackedSamples, evaluated: EvaluatedCandidate, *, rank: int) -> int:
    """Return the index of the sample whose saved tensors take most memory at a rank's peak.

    Args:
        packed: Packed samples of the step.
        evaluated: Evaluated candidate of the step.
        rank: Pipeline rank.
    """
    candidate, placement = evaluated.candidate, evaluated.placement
    own = rank_windows(candidate)[rank]
    held = placed_bytes(placement, "retained", candidate=candidate)
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
    """Return, per subsequence, the index of each of its samples and the tokens in it."""
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
