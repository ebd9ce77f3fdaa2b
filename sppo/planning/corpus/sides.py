"""Other ways to pack the same samples, priced as the planned one is: the sides of a comparison.

*padded*: every sample alone, as long as the longest of its step. *stream*: rows of a fixed length
cut from one stream, documents isolated. *fixed*: Seq1F1B with chunks of a fixed number of tokens,
which split long samples and pack short ones. *elastic*: packed and cut by the planner of steps. A
side whose chunks are fixed takes the number of tokens with which its steps are simulated to be
fastest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sppo.planning.corpus.packings import Packing, fixed_chunks, padded, stream
from sppo.planning.elastic.replicas import divide_samples
from sppo.planning.elastic.step_plan import StepPlan, StepPlanner

SIDES = ("padded", "stream", "fixed", "elastic")
Pack = Callable[[int], Packing]
"""Packs the samples of a replica into chunks of so many tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class SideStep:
    """One step of one side.

    Attributes:
        packing: Of its samples.
        plan: Of the step, simulated.
        planning_s: Seconds that it took to find, once it is known how large fixed chunks are.
    """

    packing: Packing
    plan: StepPlan
    planning_s: float


def fastest_side(
    planner: StepPlanner, packs: Sequence[Pack], *, sizes: Iterable[int], most_units: int = 0
) -> list[SideStep]:
    """Return steps in chunks of the size with which they are fastest together.

    Args:
        planner: of the replica.
        packs: of each step.
        sizes: tokens of a chunk that are tried, the largest last.
        most_units: chunks of a step above which a size is passed over, but for the last; 0: none.

    Raises:
        MemoryError: with no size do all of them fit.
    """
    found: list[list[SideStep]] = []
    problems: list[MemoryError] = []
    tried = list(sizes)
    for size in tried:
        packings = [(time.perf_counter(), pack(size)) for pack in packs]
        units = max(_num_chunks(packing) for _, packing in packings)
        if most_units and units > most_units and size != tried[-1]:
            continue
        try:
            found.append([_priced(planner, packing, begin) for begin, packing in packings])
        except MemoryError as error:
            problems.append(error)
    if not found:
        raise problems[-1]
    return min(found, key=lambda steps: sum(step.plan.step_s for step in steps))


def replica_packs(
    name: str, planner: StepPlanner, lengths: Sequence[int], *, row_tokens: int
) -> Pack:
    """Return how a side packs what the replica with most work has of a step.

    Args:
        name: padded, stream or fixed.
        planner: of the run, which knows how many replicas there are.
        lengths: tokens of each sample of the step, of all replicas.
        row_tokens: of a row of the stream.
    """
    replicas, multiple = planner.base.data_parallel_degree, planner.multiple
    if name == "padded":
        # All take as long: some replicas have one more than others.
        own = [max(lengths)] * -(-len(lengths) // replicas)
        return lambda size: padded(own, chunk_tokens=size, multiple=multiple)
    if name == "stream":
        row = min(row_tokens, -(-sum(lengths) // replicas))
        return lambda size: _heaviest_rows(
            planner,
            stream(lengths, chunk_tokens=size, row_tokens=row, multiple=multiple),
        )
    own = [lengths[index] for index in heaviest_replica(planner, lengths)]
    return lambda size: fixed_chunks(own, chunk_tokens=size, multiple=multiple)


def heaviest_replica(planner: StepPlanner, lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the samples of the replica that has most work, by their places among those of a step.

    Raises:
        ValueError: a replica would have none.
    """
    seconds = planner.seconds_of(lengths)
    return max(
        planner.divided(lengths), key=lambda replica: sum(seconds[index] for index in replica)
    )


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation over the mean."""
    return float(np.std(values) / np.mean(values))


def time_deviation(plan: StepPlan) -> float:
    """Return the deviation of the simulated seconds of chunks, all stages together."""
    costs = plan.evaluated.costs
    seconds = costs.forward_s + costs.backward_s + costs.weight_s
    return deviation(seconds.sum(axis=0).tolist())


def chunk_sizes(*, least: int, most: int) -> list[int]:
    """Return tokens of fixed chunks that are tried: doubling from the least to at most the most."""
    sizes = [min(least, most)]
    while 2 * sizes[-1] <= most:
        sizes.append(2 * sizes[-1])
    return sizes


def _heaviest_rows(planner: StepPlanner, packing: Packing) -> Packing:
    """Return the rows of a stream that the replica with most work has."""
    if len(packing.sequences) == 1:
        return packing
    row_s = [
        sum(planner.seconds_of([piece.tokens for piece in pieces])) for pieces in packing.pieces
    ]
    replicas = min(planner.base.data_parallel_degree, len(row_s))
    divided = divide_samples(row_s, replicas=replicas)
    own = max(divided, key=lambda rows: sum(row_s[row] for row in rows))
    return Packing(
        tuple(packing.sequences[row] for row in own), tuple(packing.pieces[row] for row in own)
    )


def _priced(planner: StepPlanner, packing: Packing, begin: float) -> SideStep:
    plan = planner.in_sequences(packing.packed)
    return SideStep(packing, plan, time.perf_counter() - begin)


def _num_chunks(packing: Packing) -> int:
    return sum(len(sequence.lengths) for sequence in packing.sequences)
