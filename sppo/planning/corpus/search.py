"""The best way to divide a machine for a corpus: steps of samples drawn from it are planned.

Of every way to divide the devices a step of the longest samples is planned first: what cannot hold
one is out. The others are ordered by a closed form of the drawn steps; the first few are planned,
by the small search that also stands in for a plan that is late. The fastest of those is planned
again with the whole search, as training does it; all its replicas must fit in every drawn step.
Everything is deterministic: same request, same answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from sppo.config.run import RunConfig
from sppo.cost.memory.stage_memory import StageMemory
from sppo.hardware.description import HardwareSpec
from sppo.planning.corpus.sides import (
    SIDES,
    SideStep,
    chunk_sizes,
    fastest_side,
    heaviest_replica,
    replica_packs,
)
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.elastic.step_plan import StepPlan, StepPlanner, planner_of_candidate
from sppo.planning.make_plan import make_plan
from sppo.planning.plan import ExecutionPlan, digest_of, planned_part
from sppo.planning.run_plan import scheduled
from sppo.planning.search.candidate_search import best_of_degrees
from sppo.planning.search.candidates import counts_of_degrees
from sppo.planning.search.choices import SUBSEQUENCE_TOKENS, Degrees, degrees_to_try
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.shortfall import Shortfall
from sppo.planning.search.state_choices import runs_by_tiers
from sppo.units import format_bytes

RUNNERS_UP = 3
_PLANNED = 1 + RUNNERS_UP
_MOST_PLANNED = 8
"""Ways whose drawn steps are planned, at most; more than the first few only if the closed form of
one is below the fastest planned so far."""
_MOST_UNITS = 2500
"""Fixed chunks of a step of one replica above which larger ones are tried only."""


@dataclass(frozen=True, slots=True)
class DrawnSteps:
    """Steps of samples that are drawn from a corpus.

    Attributes:
        source: The directory of its tokens, or the name of a distribution of lengths.
        description: Where the lengths come from.
        lengths: Tokens of each sample of each step, of all replicas.
    """

    source: str
    description: str
    lengths: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all steps."""
        return sum(map(sum, self.lengths))


@dataclass(frozen=True, slots=True)
class RefusedDegrees:
    """Degrees that do not fit or cannot work.

    Attributes:
        degrees: Which.
        reason: Text that says why.
        short_bytes: Bytes by which it does not fit; None where it is not for memory.
        steps: Whether the longest sample fits, and a drawn step does not.
    """

    degrees: Degrees
    reason: str
    short_bytes: int | None = None
    steps: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PlannedDegrees:
    """One way to divide the devices, with the drawn steps as it runs them.

    Attributes:
        run: The request with these degrees.
        longest: A step of the longest samples.
        planner: Of steps.
        closed_s: Seconds of all drawn steps in closed form, everything retained.
        plans: Of the replica that has most work, of each drawn step.
    """

    run: RunConfig
    longest: EvaluatedCandidate
    planner: StepPlanner
    closed_s: float
    plans: tuple[StepPlan, ...] = ()

    @property
    def degrees(self) -> Degrees:
        """Return the division of the devices."""
        return self.longest.degrees

    @property
    def seconds(self) -> float:
        """Simulated seconds of all drawn steps."""
        return sum(plan.step_s for plan in self.plans)

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the pipeline ranks over all drawn steps."""
        return sum(plan.bubble_fraction * plan.step_s for plan in self.plans) / self.seconds

    @property
    def fullest(self) -> StepPlan:
        """The drawn step in which a device holds most."""
        return max(self.plans, key=lambda plan: plan.evaluated.device_peak_bytes)

    @property
    def fullest_rank(self) -> int:
        """The pipeline rank that holds most in it."""
        return fullest_rank(self.fullest.evaluated.memory)


@dataclass(frozen=True, slots=True, eq=False)
class CorpusSolution:
    """The answer to a request.

    Attributes:
        run: The request.
        hardware: The machine.
        steps: What was drawn.
        best: The recommended way; None where nothing fits.
        runners_up: The next best, best first.
        refused: What does not fit or cannot work; the ones that came nearest first.
        sides: Steps of each side, with the degrees of the best; why it does not fit of one that
            does not.
        num_divisions: Ways to divide the devices that were looked at.
        num_planned: Of these, ways whose drawn steps were planned.
    """

    run: RunConfig
    hardware: HardwareSpec
    steps: DrawnSteps
    best: PlannedDegrees | None
    runners_up: tuple[PlannedDegrees, ...]
    refused: tuple[RefusedDegrees, ...]
    sides: dict[str, list[SideStep] | str]
    num_divisions: int
    num_planned: int


def solve_corpus(run: RunConfig, *, hardware: HardwareSpec, steps: DrawnSteps) -> CorpusSolution:
    """Return the best way to train `run` on `hardware`, judged by drawn steps.

    Raises:
        ValueError: the run asks for what the machine or the model cannot do.
    """
    fewest = min(map(len, steps.lengths))
    if run.train.tokens_per_step is not None:
        # A step of the longest samples has fewest, and one for each replica.
        fewest = max(1, min(fewest, run.train.tokens_per_step // run.sequence.length))
    possible, refusals = degrees_to_try(run, hardware=hardware, samples=fewest)
    refused = [RefusedDegrees(refusal.degrees, refusal.reason) for refusal in refusals]
    fitting: list[PlannedDegrees] = []
    for degrees in possible:
        found = _of_degrees(run, degrees, hardware=hardware, steps=steps)
        if isinstance(found, RefusedDegrees):
            refused.append(found)
        else:
            fitting.append(found)
    leaders = _planned(sorted(fitting, key=_closed_first), steps=steps, refused=refused)
    best, others = _recommended(leaders, steps=steps, refused=refused)
    return CorpusSolution(
        run,
        hardware,
        steps,
        best,
        tuple(others[:RUNNERS_UP]),
        tuple(sorted(refused, key=_nearest_first)),
        {} if best is None else _sides(best, steps=steps),
        num_divisions=len(possible) + len(refusals),
        num_planned=len(leaders),
    )


def plan_of_longest(solution: CorpusSolution) -> ExecutionPlan:
    """Return the plan that training follows: of a step of the longest samples, by the best degrees.

    It rests on the request as it was written, with or without degrees.
    """
    best = solution.best
    assert best is not None, "only called where something fits"
    plan = make_plan(run_of_longest_samples(best.run), best.longest)
    part = planned_part(run_of_longest_samples(solution.run))
    return replace(plan, run=part, run_digest=digest_of(part))


def fullest_rank(memory: Sequence[StageMemory]) -> int:
    """Return the pipeline rank with most on its devices."""
    return max(range(len(memory)), key=lambda rank: memory[rank].device.total_bytes)


def _of_degrees(
    run: RunConfig, degrees: Degrees, *, hardware: HardwareSpec, steps: DrawnSteps
) -> PlannedDegrees | RefusedDegrees:
    """Plan a step of the longest samples, and price the drawn ones in closed form."""
    own = run.model_copy(
        update={
            "parallel": run.parallel.model_copy(
                update={
                    "data_parallel_degree": degrees.data_parallel,
                    "pipeline_parallel_degree": degrees.pipeline_parallel,
                    "sequence_parallel_degree": degrees.sequence_parallel,
                }
            )
        }
    )
    longest = run_of_longest_samples(own)
    counts, problem = counts_of_degrees(longest, hardware=hardware, degrees=degrees)
    if not counts:
        return RefusedDegrees(degrees, problem)
    tried = []
    for attempt in runs_by_tiers(longest, hardware=hardware):
        found = best_of_degrees(attempt, hardware=hardware, degrees=degrees)
        if found.shortfall is None:
            return _with_closed_form(own, found, steps=steps)
        tried.append((found, found.shortfall))
    nearest, shortfall = min(tried, key=lambda one: one[1].short_bytes)
    return RefusedDegrees(
        degrees, _longest_lacks(longest, nearest, shortfall), shortfall.short_bytes
    )


def _with_closed_form(
    run: RunConfig, longest: EvaluatedCandidate, *, steps: DrawnSteps
) -> PlannedDegrees:
    planner = _quick_planner(run, longest)
    seconds = sum(
        planner.least_s([lengths[index] for index in heaviest_replica(planner, lengths)])
        for lengths in steps.lengths
    )
    closed_s = seconds + len(steps.lengths) * longest.time.update_s
    return PlannedDegrees(run, longest, planner, closed_s)


def _quick_planner(run: RunConfig, longest: EvaluatedCandidate) -> StepPlanner:
    """Return what plans steps by the small search."""
    candidate = longest.candidate
    candidate = replace(candidate, kv=candidate.kv_of_stage(0))
    part = planned_part(run_of_longest_samples(run))
    planner = planner_of_candidate(candidate, run=part, background_saves=run.checkpoint.async_save)
    return replace(planner, quick=True, levels=False)


def _planned(
    fitting: Sequence[PlannedDegrees], *, steps: DrawnSteps, refused: list[RefusedDegrees]
) -> list[PlannedDegrees]:
    """Return the first few with the drawn steps planned, the fastest first.

    Adds those whose steps do not fit to `refused`.
    """
    found: list[PlannedDegrees] = []
    for way in fitting:
        fastest = min((one.seconds for one in found), default=float("inf"))
        enough = len(found) >= _PLANNED and way.closed_s >= fastest
        if enough or len(found) == _MOST_PLANNED:
            break
        planned: list[PlannedDegrees] = []
        for longest in _numbers_of_stages(way):
            scheduled_one = scheduled(way.run, longest)
            planner = _quick_planner(way.run, scheduled_one)
            try:
                plans = _heaviest_plans(planner, steps)
            except MemoryError as error:
                problem = RefusedDegrees(way.degrees, str(error), steps=True)
                continue
            planned.append(replace(way, longest=scheduled_one, planner=planner, plans=plans))
        if planned:
            found.append(min(planned, key=_fastest_first))
        else:
            refused.append(problem)
    return sorted(found, key=_fastest_first)


def _numbers_of_stages(way: PlannedDegrees) -> Iterator[EvaluatedCandidate]:
    """Yield the step of the longest samples, and the one with a stage on each rank if that fits.

    Such a step has a long bubble, which several stages on a rank shorten; many short samples fill
    the pipeline by themselves, and for them several stages only add messages.
    """
    yield way.longest
    if way.longest.candidate.virtual_stages == 1 or way.run.parallel.virtual_stages != "auto":
        return
    single = way.run.parallel.model_copy(update={"virtual_stages": 1})
    longest = run_of_longest_samples(way.run.model_copy(update={"parallel": single}))
    hardware = way.longest.candidate.workload.hardware
    for attempt in runs_by_tiers(longest, hardware=hardware):
        found = best_of_degrees(attempt, hardware=hardware, degrees=way.degrees)
        if found.shortfall is None:
            yield found
            return


def _recommended(
    leaders: Iterable[PlannedDegrees], *, steps: DrawnSteps, refused: list[RefusedDegrees]
) -> tuple[PlannedDegrees | None, list[PlannedDegrees]]:
    """Return the first of which all replicas fit in every step, planned again, and the others.

    Adds those that do not fit to `refused`.
    """
    best, others = None, []
    for way in leaders:
        if best is not None:
            others.append(way)
            continue
        try:
            for lengths in _all_replicas(way.planner, steps):
                way.planner.plan(lengths)
        except MemoryError as error:
            refused.append(RefusedDegrees(way.degrees, str(error), steps=True))
            continue
        searching = replace(way.planner, quick=False, levels=True)
        plans = zip(way.plans, _heaviest_plans(searching, steps), strict=True)
        fastest = tuple(min(pair, key=lambda plan: plan.step_s) for pair in plans)
        best = replace(way, plans=fastest)
    return best, others


def _all_replicas(planner: StepPlanner, steps: DrawnSteps) -> Iterator[list[int]]:
    """Yield the longest sample alone, then the samples of each replica of each step."""
    yield [planner.longest]
    for lengths in steps.lengths:
        for replica in planner.divided(lengths):
            yield [lengths[index] for index in replica]


def _heaviest_plans(planner: StepPlanner, steps: DrawnSteps) -> tuple[StepPlan, ...]:
    """Return the plans of the replica that has most work, of each step.

    Raises:
        MemoryError: one does not fit.
    """
    return tuple(
        planner.plan([lengths[index] for index in heaviest_replica(planner, lengths)])
        for lengths in steps.lengths
    )


def _sides(best: PlannedDegrees, *, steps: DrawnSteps) -> dict[str, list[SideStep] | str]:
    """Return the steps of each side; of one that does not fit, why."""
    planner = best.planner
    least, most = SUBSEQUENCE_TOKENS[planner.base.workload.hardware.device.kind]
    sizes = chunk_sizes(least=least, most=min(most, planner.longest))
    found: dict[str, list[SideStep] | str] = {}
    for name in SIDES[:-1]:
        packs = [
            replica_packs(name, planner, lengths, row_tokens=planner.longest)
            for lengths in steps.lengths
        ]
        try:
            found[name] = fastest_side(planner, packs, sizes=sizes, most_units=_MOST_UNITS)
        except MemoryError as error:
            found[name] = str(error)
    return found


def _longest_lacks(run: RunConfig, evaluated: EvaluatedCandidate, shortfall: Shortfall) -> str:
    """Say what a step of the longest samples lacks, on which stage."""
    stages = evaluated.candidate.stages_of_rank(shortfall.rank)
    where = f"stage {stages[0]} needs"
    if len(stages) > 1:
        where = f"stages {', '.join(map(str, stages))} of rank {shortfall.rank} need"
    return (
        f"the longest sample, of {run.sequence.length} tokens, does not fit: {where} "
        f"{format_bytes(shortfall.needed_bytes)} of {shortfall.place} memory and "
        f"{format_bytes(shortfall.available_bytes)} are there: short by "
        f"{format_bytes(shortfall.short_bytes)}; most of it is "
        f"{shortfall.bucket.replace('_', ' ')} ({format_bytes(shortfall.bucket_bytes)})"
    )


def _closed_first(way: PlannedDegrees) -> tuple[float, int, int]:
    degrees = way.degrees
    return way.closed_s, degrees.pipeline_parallel, degrees.sequence_parallel


def _fastest_first(way: PlannedDegrees) -> tuple[float, int, int]:
    degrees = way.degrees
    return way.seconds, degrees.pipeline_parallel, degrees.sequence_parallel


def _nearest_first(refused: RefusedDegrees) -> tuple[bool, bool, int]:
    return not refused.steps, refused.short_bytes is None, refused.short_bytes or 0
