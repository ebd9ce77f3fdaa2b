"""The sides of ``compare_infinipipe.py``: the same samples, as each of them packs and recomputes.

All run Seq1F1B, are priced by the same cost model, and have the same memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from level_sides import RECOMPUTING_SIDES  # beside this file

from sppo.config import check_run
from sppo.config.run import RunConfig
from sppo.data.samples.length_distributions import draw
from sppo.hardware.run_hardware import run_hardware
from sppo.planning.corpus.packings import fixed_chunks
from sppo.planning.corpus.sides import heaviest_replica
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
"""Shapes of GPT by name: 7B and 13B those of the SPPO paper, 30B that of OPT-30B."""
_ZERO = {"30b": 3}
"""Level of ZeRO that a model needs to fit, where that is not 1."""
LAYOUTS = {
    "paper": (Degrees(1, 4, 8),),
    "own": tuple(
        Degrees(*degrees)
        for degrees in ((1, 4, 8), (1, 8, 4), (1, 16, 2), (2, 2, 8), (2, 4, 4), (2, 8, 2))
    ),
}
"""Ways to divide the devices of which a side takes its fastest: InfiniPipe's, which has sequence
parallelism inside a node and a stage on each, or any of a few."""
CHUNKS = (2048, 4096, 8192, 16384, 32768, 65536)
"""Tokens of fixed chunks that are tried."""
BASELINES = ("fixed", "fixed_uniform")
"""Seq1F1B; a comparison is with the faster one."""


@dataclass(frozen=True, slots=True)
class Case:
    """What all sides train.

    Attributes:
        model: One of `MODELS`.
        distribution: Of the lengths of samples.
        longest: Tokens of the longest sample; longer ones are cut.
        layout: One of `LAYOUTS`.
        samples: Of a step.
        steps: How many, each of other samples.
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


@dataclass(frozen=True, slots=True, eq=False)
class TimedPlan:
    """A step of one side.

    Attributes:
        plan: Of the replica with most work, simulated.
        planning_s: Seconds that it took to find, once it is known how large fixed chunks are.
    """

    plan: StepPlan
    planning_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """The steps of one side.

    Attributes:
        steps: The fastest.
        chunk_s: Seconds of all steps by tokens of a fixed chunk, of sizes that fit; empty where
            chunks are planned.
    """

    steps: Sequence[TimedPlan]
    chunk_s: Mapping[int, float]

    @property
    def seconds(self) -> float:
        """Seconds of all steps."""
        return sum(step.plan.step_s for step in self.steps)


def planned_sides(case: Case, names: Sequence[str]) -> dict[str, Side | str]:
    """Return the steps of each side; of one that does not fit, why.

    Sides in fixed chunks whose levels are not planned take the fastest layout of each, all others
    that of the elastic side.
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
    """Return what plans the steps of a case, for each layout that its longest sample fits in.

    Without memory behind the devices; where none fits so, optimizer states are in host memory, and
    activations may be.

    Raises:
        MemoryError: not even then.
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
        MemoryError: one does not fit.
    """
    return SIDES[name](planner, _own_lengths(planner, case))


def _own_lengths(planner: StepPlanner, case: Case) -> list[list[int]]:
    """Tokens of each sample of the replica with most work, of each step."""
    return [
        [lengths[index] for index in heaviest_replica(planner, lengths)] for lengths in case.lengths
    ]


def _quick_seconds(case: Case, planner: StepPlanner) -> float:
    """Seconds of the elastic side in one layout, by the small search; no end where none fits."""
    quick = replace(planner, quick=True, levels=False)
    try:
        return sum(quick.plan(lengths).step_s for lengths in _own_lengths(planner, case))
    except MemoryError:
        return math.inf


def _longest_samples(
    case: Case, degrees: Degrees, *, zero: int, tier: str
) -> tuple[RunConfig, EvaluatedCandidate]:
    """Return the run of the longest samples of a case, and what it comes to."""
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
        source="scripts/compare_infinipipe.py",
    )
    run = run_of_longest_samples(run)
    return run, best_of_degrees(run, hardware=run_hardware(run), degrees=degrees)


_Steps = Sequence[Sequence[int]]
_Place = Callable[[StepPlanner, PackedSamples], StepPlan]
"""Decides what becomes of the activations of samples that are packed, or raises MemoryError."""


def _in_fixed_chunks(
    place: _Place, planner: StepPlanner, steps: _Steps, *, sizes: Sequence[int] = CHUNKS
) -> Side:
    """Return steps in chunks of the size with which they are fastest together."""
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
    """Place activations as one of the sides of ``level_sides.py`` does."""
    found = RECOMPUTING_SIDES[side](planner.base.with_packed(packed.sequences))
    if found is None:
        raise MemoryError(f"{side}: subsequences of this size do not fit")
    return StepPlan(packed, found)


def _in_chunks_with_levels(planner: StepPlanner, steps: _Steps) -> Side:
    """Return steps in fixed chunks, with levels for the two sizes that are fastest without."""
    chunk_s = _in_fixed_chunks(_by_policy, planner, steps).chunk_s
    sizes = sorted(chunk_s, key=chunk_s.__getitem__)[:2]
    return _in_fixed_chunks(partial(_by_levels, "levels"), planner, steps, sizes=sizes)


def _in_planned_chunks(planner: StepPlanner, steps: _Steps, *, policy: str = "hybrid") -> Side:
    """Return steps as the planner makes them, activations placed by a policy."""
    planner = replace(planner, base=replace(planner.base, policy=policy))
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
"""By name; :mod:`compare_infinipipe` says what they are."""
