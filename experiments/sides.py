"""Sides of a comparison: ways to pack the same samples, priced like the planned packing.

*padded*: every sample in a sequence of its own, padded to the longest of its step. *stream*: rows
of a fixed length cut from one stream, with documents isolated. *fixed*: Seq1F1B with chunks of a
fixed number of tokens, which split long samples and pack short ones. *elastic*: packed and cut by
the planner of steps. All sides except *elastic* have fixed chunks, of the size with which their
steps simulate fastest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.sample_packings import Packing, fixed_chunks, padded, stream
from sppo.planning.corpus.search import heaviest_replica
from sppo.planning.elastic.replicas import divide_samples
from sppo.planning.elastic.step_plan import StepPlan, StepPlanner

Pack = Callable[[int], Packing]
"""Function that packs the samples of a replica, given the number of tokens per chunk."""


@dataclass(frozen=True, slots=True, eq=False)
class SideStep:
    """One step of one side of a comparison.

    Attributes:
        packing: Packing of the step's samples.
        plan: Simulated plan of the step.
        planning_s: Seconds that packing and planning took, for the chosen size of chunks alone.
    """

    packing: Packing
    plan: StepPlan
    planning_s: float


def fastest_side(
    planner: StepPlanner, packs: Sequence[Pack], *, sizes: Iterable[int], most_units: int = 0
) -> list[SideStep]:
    """Return the steps of a side with the size of chunks that is fastest for all steps together.

    Args:
        planner: Planner of steps of a replica.
        packs: Function that packs the samples of a step, for each step.
        sizes: Tokens of a chunk to try, the largest last.
        most_units: Number of chunks of a step above which a size is skipped, except the last size;
            0 for no limit.

    Raises:
        MemoryError: There is no size with which all steps fit.
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
    """Return a function that packs the samples of the replica with most work, as a side does.

    Args:
        name: Name of the side: "padded", "stream" or "fixed".
        planner: Planner of steps, which knows the number of replicas.
        lengths: Tokens of each sample of the step, of all replicas.
        row_tokens: Most tokens of a row of the side "stream".
    """
    replicas, multiple = planner.base.data_parallel_degree, planner.multiple
    if name == "padded":
        # All sequences take equal time, so the replica with most work has the most of them.
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


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of `values` over their mean."""
    return float(np.std(values) / np.mean(values))


def time_deviation(plan: StepPlan) -> float:
    """Return the relative standard deviation of the seconds of chunks, summed over all stages."""
    costs = plan.evaluated.costs
    seconds = costs.forward_s + costs.backward_s + costs.weight_s
    return deviation(seconds.sum(axis=0).tolist())


def chunk_sizes(*, least: int, most: int) -> list[int]:
    """Return the sizes of fixed chunks to try, doubling from `least` up to at most `most`."""
    sizes = [min(least, most)]
    while 2 * sizes[-1] <= most:
        sizes.append(2 * sizes[-1])
    return sizes


def _heaviest_rows(planner: StepPlanner, packing: Packing) -> Packing:
    """Return the rows of a stream that belong to the replica with most work."""
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
    plan = planner.plan_packed(packing.packed)
    return SideStep(packing, plan, time.perf_counter() - begin)


def _num_chunks(packing: Packing) -> int:
    return sum(len(sequence.lengths) for sequence in packing.sequences)
