"""Plan of a run file without a search over degrees: what ``sppo train`` uses without a plan file.

Degrees of parallelism are those of the run, of which :mod:`sppo.planning.chosen_run` has chosen the
ones that the run file leaves out. Decided here are the keys that the run file leaves
to ``auto``, such as the number of subsequences and the placement of saved activations in the
available memory.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from sppo.config.run import RunConfig
from sppo.cost.candidate import Candidate
from sppo.hardware.description import HardwareSpec
from sppo.planning.make_plan import make_plan
from sppo.planning.partition import boundaries_of
from sppo.planning.plan import ExecutionPlan
from sppo.planning.search.choices import (
    Degrees,
    cut_sequence,
    degree_problems,
    with_disk,
)
from sppo.planning.search.division import Division
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.evaluation import evaluate_candidate, with_less_host_memory
from sppo.planning.search.state_choices import runs_by_tiers
from sppo.planning.too_large import too_large
from sppo.schedule.orders.names import WHOLE_SEQUENCES, WITH_VIRTUAL_STAGES

EVALUATION_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Target tokens of an evaluation's subsequences with ``num_subsequences: auto``, by device kind.

On a CPU 1Ki and 2Ki took the same time; 2Ki makes fewer subsequences. The value for GPUs is not
measured: it is the middle of the SPPO paper's range of 2K to 16K."""
USABLE_FRACTION = 0.85
"""Fraction of the free device memory that may be filled if the activation policy is ``auto``."""
_UNBOUNDED_BYTES = 1 << 60


def plan_run(
    run: RunConfig,
    *,
    hardware: HardwareSpec,
    available_bytes: int,
    disk_bytes: int = 0,
    host_bytes: int = 0,
) -> ExecutionPlan:
    """Plan a run on a machine with the given free memory, deciding all keys that are ``auto``.

    An activation policy that the run file names is always used; if it does not fit, this raises.

    Args:
        run: Validated run configuration.
        hardware: Description of the machine; its memory sizes are ignored.
        available_bytes: Free memory of one device.
        disk_bytes: Bytes that the run may use of the disk of `activations.disk`.
        host_bytes: Host memory that one device may use; 0 on a CPU, whose device memory is the
            host's.

    Raises:
        ValueError: The run asks for a tier that the machine does not have.
        MemoryError: The run does not fit, or needs a disk that is full; the message says what to
            change.
    """
    asked, node = run.activations, hardware.node
    chosen = asked.policy in ("auto", "hybrid")
    usable = int(available_bytes * USABLE_FRACTION) if chosen else available_bytes
    device = replace(hardware.device, memory_bytes=max(1, usable), reserved_bytes=0)
    node = replace(node, host_memory_bytes=host_bytes * node.num_devices)
    is_full = asked.disk is not None and disk_bytes == 0
    without = asked.model_copy(update={"disk": None, "disk_memory": "auto"})
    there = run.model_copy(update={"activations": without}) if is_full else run
    machine = replace(hardware, device=device, node=with_disk(node, disk_bytes))
    try:
        planned = executed_candidate(there, hardware=machine)
    except ValueError as error:
        if is_full:
            raise MemoryError(
                f"activations.disk={asked.disk}: the disk is full; free space, or name a directory "
                "on another disk"
            ) from error
        raise
    if planned.shortfall is not None:
        raise MemoryError(too_large(run, planned))
    return make_plan(run, planned)


def plan_without_limits(run: RunConfig, *, hardware: HardwareSpec) -> ExecutionPlan:
    """Return the plan of a run on a machine with more memory than any has."""
    return plan_run(
        run,
        hardware=hardware,
        available_bytes=_UNBOUNDED_BYTES,
        disk_bytes=_UNBOUNDED_BYTES,
        host_bytes=_UNBOUNDED_BYTES if hardware.device.kind == "cuda" else 0,
    )


def executed_candidate(run: RunConfig, *, hardware: HardwareSpec) -> EvaluatedCandidate:
    """Return the candidate of a run as it is executed; with what it lacks if it does not fit.

    Raises:
        ValueError: See :func:`evaluate_in_nearest_tiers`.
    """
    return with_less_host_memory(evaluate_in_nearest_tiers(run, hardware=hardware))


def in_schedule(candidate: Candidate, schedule: str) -> EvaluatedCandidate:
    """Evaluate a candidate in another schedule, whether it fits or not."""
    virtual = candidate.virtual_stages if schedule in WITH_VIRTUAL_STAGES else 1
    candidate = replace(candidate, schedule=schedule, virtual_stages=virtual)
    if schedule in WHOLE_SEQUENCES:
        candidate = replace(candidate, lengths=(sum(candidate.lengths),))
    return evaluate_candidate(candidate)


def evaluate_in_nearest_tiers(run: RunConfig, *, hardware: HardwareSpec) -> EvaluatedCandidate:
    """Return the best candidate with the degrees of a run, in the nearest tiers in which any fits.

    If nothing fits, return the candidate that is short of the fewest bytes.

    Args:
        run: Run configuration with all degrees written.
        hardware: Description of the machine.

    Raises:
        ValueError: A degree does not divide the model or the step, or subsequences have fewer
            tokens than ranks need.
    """
    degrees = Degrees.of_run(run)
    for _, problem in degree_problems(run, degrees=degrees):
        raise ValueError(problem)
    tried: list[EvaluatedCandidate] = []
    for attempt in runs_by_tiers(run, hardware=hardware):
        division = Division(attempt, hardware=hardware, degrees=degrees)
        tried.append(division.best() or division.nearest)
        if tried[-1].shortfall is None:
            break
    return min(tried, key=lambda one: one.short_bytes)


def evaluation_boundaries(run: RunConfig, *, hardware: HardwareSpec) -> tuple[int, ...]:
    """Return the cuts of a sequence for an evaluation, which runs forwards alone."""
    asked, target = run.sequence.num_subsequences, EVALUATION_TOKENS[hardware.device.kind]
    lengths = cut_sequence(
        run,
        num_subsequences=ceil(run.sequence.length / target) if asked == "auto" else asked,
        num_stages=run.parallel.pipeline_parallel_degree,
    )
    return boundaries_of(lengths)
