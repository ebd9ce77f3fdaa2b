"""Search for the best division of a machine for a corpus, by planning steps drawn from the corpus.

For every division of the devices, a step of the longest samples is planned first; divisions in
which it does not fit are rejected. The others are ordered by a closed form of the drawn steps. The
steps of the first few are planned by the quick search, which also replaces plans that are late in
training. The fastest division is planned again with the full search, as in training; all its
replicas must fit in every drawn step. The search is deterministic: same request, same answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from sppo.config.run import RunConfig
from sppo.cost.memory.stage_memory import StageMemory
from sppo.hardware.description import HardwareSpec
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.elastic.sample_shortfall import lacking_text
from sppo.planning.elastic.step_plan import StepPlan
from sppo.planning.elastic.step_planner import StepPlanner, planner_of_candidate
from sppo.planning.make_plan import make_plan
from sppo.planning.plan import ExecutionPlan, planned_part
from sppo.planning.run_plan import evaluate_in_nearest_tiers
from sppo.planning.search.candidates import candidates_of_degrees
from sppo.planning.search.choices import Degrees, degrees_to_try
from sppo.planning.search.division import Rejection, rejection_of
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.evaluation import with_less_host_memory
from sppo.planning.search.solver import RUNNERS_UP

_PLANNED = 1 + RUNNERS_UP
_MOST_PLANNED = 8
"""Most divisions whose drawn steps are planned. Beyond the first few, a division is planned only if
its closed form is below the fastest planned so far."""


@dataclass(frozen=True, slots=True)
class DrawnSteps:
    """Steps of samples drawn from a corpus.

    Attributes:
        source: Directory of the corpus's tokens, or name of a distribution of lengths.
        description: Text on the origin of the lengths.
        lengths: Tokens of each sample of each step, of all replicas.
    """

    source: str
    description: str
    lengths: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all steps."""
        return sum(map(sum, self.lengths))


@dataclass(frozen=True, slots=True, eq=False)
class PlannedDegrees:
    """One division of the devices, with its plans of the drawn steps.

    Attributes:
        run: Run configuration with the degrees of the division.
        longest: Evaluated candidate of a step of the longest samples.
        planner: Planner of steps.
        closed_s: Seconds of all drawn steps in closed form, with everything retained.
        plans: Plan of the replica with most work, for each drawn step; () until planned.
    """

    run: RunConfig
    longest: EvaluatedCandidate
    planner: StepPlanner
    closed_s: float
    plans: tuple[StepPlan, ...] = ()

    @property
    def degrees(self) -> Degrees:
        """Degrees of parallelism of the division."""
        return self.longest.degrees

    @property
    def seconds(self) -> float:
        """Simulated seconds of all drawn steps."""
        return sum(plan.step_s for plan in self.plans)

    @property
    def step_s(self) -> float:
        """Simulated seconds of a drawn step, on average."""
        return self.seconds / len(self.plans)

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the pipeline ranks, over all drawn steps."""
        return sum(plan.bubble_fraction * plan.step_s for plan in self.plans) / self.seconds

    @property
    def fullest(self) -> StepPlan:
        """Plan of the drawn step with the highest device memory."""
        return max(self.plans, key=lambda plan: plan.evaluated.device_peak_bytes)

    @property
    def node_host_bytes(self) -> int:
        """Peak bytes of host memory of all devices of one node together, over all drawn steps."""
        return max(plan.evaluated.node_host_bytes for plan in self.plans)


@dataclass(frozen=True, slots=True, eq=False)
class CorpusSolution:
    """Answer to a request for the best division of a machine for a corpus.

    Attributes:
        run: The request.
        hardware: Description of the machine.
        steps: Drawn steps.
        best: Recommended division; None if nothing fits.
        runners_up: Next best divisions, best first.
        rejected: Degrees that do not fit or cannot work; the nearest to fitting first.
        num_divisions: Number of divisions of the devices that were considered.
        num_planned: Number of divisions whose drawn steps were planned and fit.
    """

    run: RunConfig
    hardware: HardwareSpec
    steps: DrawnSteps
    best: PlannedDegrees | None
    runners_up: tuple[PlannedDegrees, ...]
    rejected: tuple[Rejection, ...]
    num_divisions: int
    num_planned: int


def solve_corpus(run: RunConfig, *, hardware: HardwareSpec, steps: DrawnSteps) -> CorpusSolution:
    """Return the best way to train `run` on `hardware`, judged by drawn steps.

    Raises:
        ValueError: The run asks for something that the machine or the model cannot do.
    """
    fewest = min(map(len, steps.lengths))
    if run.train.tokens_per_step is not None:
        # A step of the longest samples has the fewest samples, and each replica needs one.
        fewest = max(1, min(fewest, run.train.tokens_per_step // run.sequence.length))
    possible, refusals = degrees_to_try(run, hardware=hardware, samples=fewest)
    refused = [Rejection(degrees, reason) for degrees, reason in refusals.items()]
    fitting: list[PlannedDegrees] = []
    for degrees in possible:
        found = _of_degrees(run, degrees, hardware=hardware, steps=steps)
        if isinstance(found, Rejection):
            refused.append(found)
        else:
            fitting.append(found)
    planned: list[PlannedDegrees] = []
    for way in sorted(fitting, key=lambda way: _order(way.closed_s, way)):
        fastest = min((one.seconds for one in planned), default=inf)
        if len(planned) == _MOST_PLANNED or (len(planned) >= _PLANNED and way.closed_s >= fastest):
            break
        try:
            planned.append(_with_plans(way, steps))
        except MemoryError as error:
            refused.append(Rejection(way.degrees, str(error), steps=True))
    others = sorted(planned, key=lambda way: _order(way.seconds, way))
    best = None
    while others and best is None:
        way = others.pop(0)
        try:
            best = _fully_planned(way, steps)
        except MemoryError as error:
            refused.append(Rejection(way.degrees, str(error), steps=True))
    return CorpusSolution(
        run,
        hardware,
        steps,
        best,
        tuple(others[:RUNNERS_UP]),
        tuple(sorted(refused, key=_nearest_first)),
        num_divisions=len(possible) + len(refusals),
        num_planned=len(planned),
    )


def plan_of_longest(solution: CorpusSolution) -> ExecutionPlan:
    """Return the execution plan for training: a step of the longest samples with the best degrees.

    The plan records the keys of the request as written, with or without degrees.
    """
    best = solution.best
    assert best is not None, "only called where something fits"
    plan = make_plan(run_of_longest_samples(best.run), best.longest)
    return replace(plan, run=planned_part(run_of_longest_samples(solution.run)))


def fullest_rank(memory: Sequence[StageMemory]) -> int:
    """Return the index of the pipeline rank with most device memory."""
    return max(range(len(memory)), key=lambda rank: memory[rank].device.total_bytes)


def heaviest_replica(planner: StepPlanner, lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the samples of the replica with most work, as indices among the samples of the step.

    Raises:
        ValueError: There are fewer samples than replicas.
    """
    seconds = planner.cost.of_samples(lengths)
    return max(
        planner.divided(lengths), key=lambda replica: sum(seconds[index] for index in replica)
    )


def _of_degrees(
    run: RunConfig, degrees: Degrees, *, hardware: HardwareSpec, steps: DrawnSteps
) -> PlannedDegrees | Rejection:
    """Evaluate a step of the longest samples, and price the drawn steps in closed form."""
    own = run.with_values({f"parallel.{key}": value for key, value in degrees.by_name.items()})
    longest = run_of_longest_samples(own)
    try:
        candidates_of_degrees(longest, hardware=hardware, degrees=degrees)
    except ValueError as error:
        return Rejection(degrees, str(error))
    found = evaluate_in_nearest_tiers(longest, hardware=hardware)
    if found.shortfall is not None:
        sample = f"the longest sample, of {run.sequence.length} tokens"
        reason = f"{sample}, does not fit: {lacking_text(found)}"
        return replace(rejection_of(found), reason=reason)
    planner = _quick_planner(own, found)
    seconds = sum(
        planner.packings([lengths[index] for index in heaviest_replica(planner, lengths)])[
            0
        ].least_s
        for lengths in steps.lengths
    )
    closed_s = seconds + len(steps.lengths) * found.time.update_s
    return PlannedDegrees(own, found, planner, closed_s)


def _quick_planner(run: RunConfig, longest: EvaluatedCandidate) -> StepPlanner:
    """Return the planner of steps by the quick search."""
    candidate = longest.candidate
    candidate = replace(candidate, kv=candidate.kv_of_stages[0])
    part = planned_part(run_of_longest_samples(run))
    planner = planner_of_candidate(candidate, run=part, background_saves=run.checkpoint.async_save)
    return replace(planner, quick=True)


def _with_plans(way: PlannedDegrees, steps: DrawnSteps) -> PlannedDegrees:
    """Return a division with the fastest plans of the drawn steps by the quick search.

    Raises:
        MemoryError: A step does not fit.
    """
    found: list[PlannedDegrees] = []
    for longest in _numbers_of_stages(way):
        executed = with_less_host_memory(longest)
        planner = _quick_planner(way.run, executed)
        try:
            plans = _heaviest_plans(planner, steps)
        except MemoryError as error:
            problem = error
            continue
        found.append(replace(way, longest=executed, planner=planner, plans=plans))
    if not found:
        raise problem
    return min(found, key=lambda one: one.seconds)


def _numbers_of_stages(way: PlannedDegrees) -> Iterator[EvaluatedCandidate]:
    """Yield the step of the longest samples, and its variant with one stage per rank if that fits.

    A step of the longest samples has a long bubble, which several stages on a rank shorten. Many
    short samples fill the pipeline by themselves; for them, several stages only add messages.
    """
    yield way.longest
    if way.longest.candidate.virtual_stages == 1 or way.run.parallel.virtual_stages != "auto":
        return
    longest = run_of_longest_samples(way.run.with_values({"parallel.virtual_stages": 1}))
    found = evaluate_in_nearest_tiers(longest, hardware=way.longest.candidate.workload.hardware)
    if found.shortfall is None:
        yield found


def _fully_planned(way: PlannedDegrees, steps: DrawnSteps) -> PlannedDegrees:
    """Return a division with plans of the drawn steps by the full search, where that is faster.

    Raises:
        MemoryError: A replica does not fit in a step.
    """
    for lengths in _all_replicas(way.planner, steps):
        way.planner.plan(lengths)
    searching = replace(way.planner, quick=False)
    plans = zip(way.plans, _heaviest_plans(searching, steps), strict=True)
    return replace(way, plans=tuple(min(pair, key=lambda plan: plan.step_s) for pair in plans))


def _all_replicas(planner: StepPlanner, steps: DrawnSteps) -> Iterator[list[int]]:
    """Yield the longest sample alone, then the samples of each replica of each step."""
    yield [planner.longest]
    for lengths in steps.lengths:
        for replica in planner.divided(lengths):
            yield [lengths[index] for index in replica]


def _heaviest_plans(planner: StepPlanner, steps: DrawnSteps) -> tuple[StepPlan, ...]:
    """Return the plan of the replica with most work, for each step.

    Raises:
        MemoryError: A step does not fit.
    """
    return tuple(
        planner.plan([lengths[index] for index in heaviest_replica(planner, lengths)])
        for lengths in steps.lengths
    )


def _order(seconds: float, way: PlannedDegrees) -> tuple[float, int, int]:
    degrees = way.degrees
    return seconds, degrees.pipeline_parallel, degrees.sequence_parallel


def _nearest_first(refused: Rejection) -> tuple[bool, bool, int]:
    short = refused.shortfall
    return not refused.steps, short is None, 0 if short is None else short.short_bytes
