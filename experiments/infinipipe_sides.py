"""Sides of :mod:`experiments.infinipipe`: ways to pack and recompute the same samples.

All sides run Seq1F1B, use the same cost model, and have the same memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from experiments.packing_sides import RECOMPUTING
from experiments.sample_packings import fixed_chunks
from sppo.config import check_run
from sppo.config.run import RunConfig
from sppo.data.samples.length_distributions import draw
from sppo.hardware.run_hardware import run_hardware
from sppo.planning.corpus.search import heaviest_replica
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.elastic.packing import PackedSamples
from sppo.planning.elastic.step_plan import StepPlan, StepPlanner, planner_of_candidate
from sppo.planning.plan import planned_part
from sppo.planning.search.candidate_search import best_of_degrees
from sppo.planning.search.choices import Degrees
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate

PRESET = "a800-40g"
_NODES = 4
MODELS: Mapping[str, Mapping[str, Any]] = {
    "7b": {"preset": "gpt-7b"},
    "13b": {"preset": "gpt-13b"},
    "30b": {
        "preset": "gpt-13b",
        "num_layers": 48,
        "hidden_size": 7168,
        "num_heads": 56,
        "num_kv_heads": 56,
        "mlp_size": 28672,
    },
}
"""Shapes of GPT by name: 7B and 13B of the SPPO paper, 30B of OPT-30B."""
_ZERO = {"30b": 3}
"""ZeRO level that a model needs to fit, if it is not 1."""
LAYOUTS = {
    "paper": (Degrees(1, 4, 8),),
    "own": tuple(
        Degrees(*degrees)
        for degrees in ((1, 4, 8), (1, 8, 4), (1, 16, 2), (2, 2, 8), (2, 4, 4), (2, 8, 2))
    ),
}
"""Ways to divide the devices, of which each side uses its fastest. paper: the degrees of
InfiniPipe, with sequence parallelism inside a node and one stage on each node; own: several ways.
"""
CHUNKS = (2048, 4096, 8192, 16384, 32768, 65536)
"""Sizes of fixed chunks that are tried, in tokens."""
BASELINES = ("fixed", "fixed_uniform")
"""Sides of Seq1F1B; comparisons use the faster one."""


@dataclass(frozen=True, slots=True)
class Case:
    """Training that all sides run.

    Attributes:
        model: Key of `MODELS`.
        distribution: Distribution of the lengths of samples.
        longest: Tokens of the longest sample; longer ones are cut.
        layout: Key of `LAYOUTS`.
        samples: Number of samples of a step.
        steps: Number of steps, each with other samples.
    """

    model: str
    distribution: str
    longest: int
    layout: str
    samples: int
    steps: int

    @property
    def lengths(self) -> tuple[tuple[int, ...], ...]:
        """Tokens of each sample of each step."""
        return tuple(
            draw(self.distribution, self.samples, seed=step, longest=self.longest)
            for step in range(self.steps)
        )


class TimedPlan(NamedTuple):
    """Plan of a step, of the replica with the most work, and the seconds of planning it."""

    plan: StepPlan
    planning_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """Steps of one side.

    Attributes:
        steps: Fastest steps of the side.
        chunk_s: Seconds of all steps by size of fixed chunks, for sizes that fit; empty if chunks
            are planned.
    """

    steps: Sequence[TimedPlan]
    chunk_s: Mapping[int, float]

    @property
    def seconds(self) -> float:
        """Seconds of all steps."""
        return sum(step.plan.step_s for step in self.steps)


def planned_sides(case: Case, names: Sequence[str]) -> dict[str, Side | str]:
    """Return the steps of each side; the reason for a side that does not fit.

    Sides with fixed chunks and without planned levels use their own fastest layout; all other sides
    use the layout that is fastest for the elastic side.
    """
    planners = planners_of(case)
    own = min(planners, key=partial(_quick_seconds, case))
    found: dict[str, Side | str] = {}
    for name in names:
        sides: list[Side] = []
        for planner in planners if name.startswith(BASELINES) else [own]:
            try:
                sides.append(planned_side(name, planner, case))
            except MemoryError as error:
                found[name] = str(error)
        if sides:
            found[name] = min(sides, key=lambda side: side.seconds)
    return found


def planners_of(case: Case) -> list[StepPlanner]:
    """Return a step planner for each layout in which the longest sample of a case fits.

    Plans use device memory alone. If no layout fits, optimizer states are in host memory, and
    activations may be.

    Raises:
        MemoryError: No layout fits even with host memory.
    """
    zero = _ZERO.get(case.model, 1)
    layouts = [one for one in LAYOUTS[case.layout] if zero < 2 or one.data_parallel == 1]
    for tier in ("device", "host"):
        found = [_longest_samples(case, degrees, zero=zero, tier=tier) for degrees in layouts]
        planners = [
            planner_of_candidate(longest.candidate, run=planned_part(run))
            for run, longest in found
            if longest.shortfall is None
        ]
        if planners:
            return planners
    nearest = min((longest for _, longest in found), key=lambda longest: longest.short_bytes)
    assert nearest.shortfall is not None, "none fits"
    raise MemoryError(nearest.shortfall.reason)


def planned_side(name: str, planner: StepPlanner, case: Case) -> Side:
    """Return the steps of a side in one layout.

    Raises:
        MemoryError: A step does not fit.
    """
    return SIDES[name](planner, _own_lengths(planner, case))


def _own_lengths(planner: StepPlanner, case: Case) -> list[list[int]]:
    """Return the tokens of each sample of the replica with the most work, for each step."""
    return [
        [lengths[index] for index in heaviest_replica(planner, lengths)] for lengths in case.lengths
    ]


def _quick_seconds(case: Case, planner: StepPlanner) -> float:
    """Return the seconds of the elastic side by the small search; inf if a step does not fit."""
    quick = replace(planner, quick=True, levels=False)
    try:
        return sum(quick.plan(lengths).step_s for lengths in _own_lengths(planner, case))
    except MemoryError:
        return math.inf


def _longest_samples(
    case: Case, degrees: Degrees, *, zero: int, tier: str
) -> tuple[RunConfig, EvaluatedCandidate]:
    """Return the run of the longest samples of a case, and its evaluated candidate."""
    run = check_run(
        {
            "model": MODELS[case.model],
            "data": {"tokens": ".", "samples": "documents"},
            "sequence": {"length": case.longest},
            "parallel": {
                "data_parallel_degree": degrees.data_parallel,
                "pipeline_parallel_degree": degrees.pipeline_parallel,
                "sequence_parallel_degree": degrees.sequence_parallel,
                "schedule": "seq1f1b",
                "multiplexed": "off",
                "zero": zero,
            },
            "activations": {"tier": tier},
            "state": {"weights": "device", "gradients": "device", "optimizer": tier},
            "train": {"samples_per_step": case.samples},
            "hardware": {"preset": PRESET, "nodes": _NODES},
        },
        source="experiments",
    )
    run = run_of_longest_samples(run)
    return run, best_of_degrees(run, hardware=run_hardware(run), degrees=degrees)


_Steps = Sequence[Sequence[int]]
_Place = Callable[[StepPlanner, PackedSamples], StepPlan]
"""Function that places the activations of packed samples, or raises MemoryError."""


def _in_fixed_chunks(
    place: _Place, planner: StepPlanner, steps: _Steps, *, sizes: Sequence[int] = CHUNKS
) -> Side:
    """Return steps with the fixed chunk size with which they are fastest together."""
    found: dict[int, list[TimedPlan]] = {}
    problem = None
    for size in sizes:
        packings = [
            fixed_chunks(lengths, chunk_tokens=size, multiple=planner.multiple) for lengths in steps
        ]
        try:
            found[size] = [_timed(partial(place, planner, packing.packed)) for packing in packings]
        except MemoryError as error:
            problem = error
    if problem is not None and not found:
        raise problem
    chunk_s = {size: Side(plans, {}).seconds for size, plans in found.items()}
    return Side(found[min(chunk_s, key=chunk_s.__getitem__)], chunk_s)


def _by_policy(planner: StepPlanner, packed: PackedSamples) -> StepPlan:
    return planner.plan_packed(packed)


def _by_levels(side: str, planner: StepPlanner, packed: PackedSamples) -> StepPlan:
    """Place activations like a side that recomputes."""
    found = RECOMPUTING[side](planner.base.with_packed(packed.sequences))
    if found is None:
        raise MemoryError(f"{side}: subsequences of this size do not fit")
    return StepPlan(packed, found)


def _in_chunks_with_levels(planner: StepPlanner, steps: _Steps) -> Side:
    """Return steps in fixed chunks, with levels for the two sizes that are fastest without."""
    chunk_s = _in_fixed_chunks(_by_policy, planner, steps).chunk_s
    sizes = sorted(chunk_s, key=chunk_s.__getitem__)[:2]
    return _in_fixed_chunks(partial(_by_levels, "levels"), planner, steps, sizes=sizes)


def _in_planned_chunks(planner: StepPlanner, steps: _Steps, *, policy: str = "hybrid") -> Side:
    """Return steps of the step planner, with activations placed by a policy."""
    planner = planner.with_base(replace(planner.base, policy=policy))
    return Side([_timed(partial(planner.plan, lengths)) for lengths in steps], {})


def _timed(plan: Callable[[], StepPlan]) -> TimedPlan:
    begin = time.perf_counter()
    return TimedPlan(plan(), time.perf_counter() - begin)


SIDES: Mapping[str, Callable[[StepPlanner, _Steps], Side]] = {
    "fixed": partial(_in_fixed_chunks, _by_policy),
    "fixed_uniform": partial(_in_fixed_chunks, partial(_by_levels, "recompute_uniform")),
    "fixed_recomputed": partial(_in_fixed_chunks, partial(_by_levels, "recompute_all")),
    "elastic": _in_planned_chunks,
    "unbalanced": _in_chunks_with_levels,
    "retained": partial(_in_planned_chunks, policy="retain"),
    "recomputed": partial(_in_planned_chunks, policy="recompute"),
}
"""Functions that return the steps of a side, by name."""
