"""Message on a step of samples that does not fit: which stage, how many bytes, how long."""

from __future__ import annotations

from collections.abc import Sequence

from sppo.planning.search.evaluated_candidate import EvaluatedCandidate

_LISTED_STAGES = 4
"""Most stages that a message lists one by one."""


def shortfall_text(lengths: Sequence[int], short: Sequence[EvaluatedCandidate]) -> str:
    """Return a message on the memory that a step lacks if no packing fits.

    Args:
        lengths: Tokens of each sample of the step.
        short: Candidates tried; the one that lacks least memory is described.
    """
    evaluated = min(short, key=lambda one: one.short_bytes)
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    return (
        f"a step of {len(lengths)} samples does not fit: {lacking_text(evaluated)} "
        f"({evaluated.short_bytes} bytes short), and the longest sample is {longest}, "
        f"of {lengths[longest]} tokens: fewer samples a step, a lower sequence.length, or "
        "activations.policy=auto, with another train.output, would need less"
    )


def lacking_text(evaluated: EvaluatedCandidate) -> str:
    """Return which stages of a candidate that does not fit lack memory, and how much."""
    shortfall = evaluated.shortfall
    assert shortfall is not None, "only called where nothing fits"
    stages = evaluated.candidate.stages_of_rank(shortfall.rank)
    needs = "needs" if len(stages) == 1 else f"of rank {shortfall.rank} need"
    return f"{stages_text(stages)} {needs} {shortfall.figures}"


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
