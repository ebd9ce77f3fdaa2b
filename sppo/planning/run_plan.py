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
from sppo.hardware.description import HardwareSpec, NodeSpec, Tier
from sppo.planning.make_plan import make_plan
from sppo.planning.plan import ExecutionPlan, boundaries_of
from sppo.planning.search.choices import (
    Degrees,
    activation_tiers,
    cut_sequence,
    multiplexed_problem,
    uses_msp,
    with_disk,
)
from sppo.planning.search.division import Division
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.planning.search.executed_candidate import as_executed
from sppo.planning.search.state_choices import runs_by_tiers
from sppo.planning.too_large import too_large
from sppo.schedule.orders.names import WHOLE_SEQUENCES, WITH_VIRTUAL_STAGES

EVALUATION_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Target tokens of an evaluation's subsequences with ``num_subsequences: auto``, by device kind.

On a CPU 1Ki and 2Ki took the same time; 2Ki makes fewer subsequences. The value for GPUs is not
measured: it is the middle of the SPPO paper's range of 2K to 16K."""
USABLE_FRACTION = 0.85
"""Fraction of the free device memory that may be filled if the activation policy is ``auto``."""


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
        MemoryError: The run does not fit; the message says what to change.
    """
    chosen = run.activations.policy in ("auto", "hybrid")
    usable = int(available_bytes * USABLE_FRACTION) if chosen else available_bytes
    device = replace(hardware.device, memory_bytes=max(1, usable), reserved_bytes=0)
    node = _tiers(run, hardware=hardware, disk_bytes=disk_bytes, host_bytes=host_bytes)
    machine = replace(hardware, device=device, node=node)
    # Without a tier, recompute whole tensor classes: joining tensors from parts gains nothing.
    has_tier = activation_tiers(run, hardware=machine) != ("device",)
    evaluated = evaluate_in_nearest_tiers(run, hardware=machine, allow_partial=has_tier)
    planned = as_executed(evaluated)
    if planned.shortfall is not None:
        raise MemoryError(too_large(run, planned))
    return make_plan(run, planned)


def executed_candidate(
    run: RunConfig, *, hardware: HardwareSpec, schedule: str | None = None
) -> EvaluatedCandidate:
    """Return the candidate of a run as it is executed; with what it lacks if it does not fit.

    Args:
        run: Run configuration with all degrees written.
        hardware: Machine to plan for.
        schedule: Name of a schedule to evaluate instead of the run's own, whether it fits or not.

    Raises:
        ValueError: Degrees or schedule do not suit the run; the message says what to change.
    """
    if schedule is None:
        return as_executed(evaluate_in_nearest_tiers(run, hardware=hardware))
    candidate = evaluate_degrees(run, hardware=hardware).candidate
    virtual = candidate.virtual_stages if schedule in WITH_VIRTUAL_STAGES else 1
    candidate = replace(candidate, schedule=schedule, virtual_stages=virtual)
    if schedule in WHOLE_SEQUENCES:
        candidate = replace(candidate, lengths=(sum(candidate.lengths),))
    return evaluate_candidate(candidate)


def evaluate_in_nearest_tiers(
    run: RunConfig, *, hardware: HardwareSpec, allow_partial: bool = True
) -> EvaluatedCandidate:
    """Evaluate a run with activations and training state in the nearest tiers in which they fit.

    If nothing fits, return the evaluation that is short of the fewest bytes.

    Args:
        run: Validated run configuration.
        hardware: Description of the machine.
        allow_partial: Whether policies may split a tensor class where the candidate allows it.

    Raises:
        ValueError: See :func:`evaluate_degrees`.
    """
    tried: list[EvaluatedCandidate] = []
    full: set[Tier] = set()
    for attempt in runs_by_tiers(run, hardware=hardware):
        if attempt.activations.tier in full:
            continue  # state that leaves the device would go to this full tier, too
        found = evaluate_degrees(attempt, hardware=hardware)
        if not allow_partial:
            found = evaluate_candidate(replace(found.candidate, allow_partial=False))
        if found.shortfall is None:
            return found
        tried.append(found)
        if found.shortfall.place != "device":
            full.add(found.candidate.tier)
    return min(tried, key=lambda one: one.short_bytes)


def evaluate_degrees(run: RunConfig, *, hardware: HardwareSpec) -> EvaluatedCandidate:
    """Return the best candidate with the degrees and tiers of a run; if none fits, the nearest.

    Raises:
        ValueError: The replicas cannot share the sequences evenly, the degrees rule out units
            sharded over pipeline ranks (MSP), or subsequences have fewer tokens than ranks need.
    """
    degrees = Degrees.of_run(run)
    if run.train.sequences_per_step % degrees.data_parallel:
        raise ValueError(
            f"train.sequences_per_step {run.train.sequences_per_step} on "
            f"{degrees.data_parallel} data-parallel replicas: must be a multiple of the replicas"
        )
    if uses_msp(run):
        refused = multiplexed_problem(run, degrees=degrees)
        if refused is not None:
            raise ValueError(refused)
    division = Division(run, hardware=hardware, degrees=degrees)
    return division.best() or division.nearest


def evaluation_boundaries(run: RunConfig, *, hardware: HardwareSpec) -> tuple[int, ...]:
    """Return the cuts of a sequence for an evaluation, which runs forwards alone."""
    asked, target = run.sequence.num_subsequences, EVALUATION_TOKENS[hardware.device.kind]
    lengths = cut_sequence(
        run,
        num_subsequences=ceil(run.sequence.length / target) if asked == "auto" else asked,
        num_stages=run.parallel.pipeline_parallel_degree,
    )
    return boundaries_of(lengths)


def _tiers(run: RunConfig, *, hardware: HardwareSpec, disk_bytes: int, host_bytes: int) -> NodeSpec:
    """Return the node with the host memory and disk space that the run may use.

    Host memory is a tier of GPUs only. A disk is used only if the run names a directory on it.

    Raises:
        ValueError: The run asks for a tier that the machine does not have.
        MemoryError: The run needs its disk, and the disk is full.
    """
    asked, node = run.activations, hardware.node
    if asked.tier == "host" and host_bytes == 0:
        raise ValueError(
            "activations.tier=host on a CPU, whose device memory is the host's: name a directory "
            "on a fast local disk (activations.disk=DIR), or leave activations.tier out"
        )
    if asked.tier == "disk" and asked.disk is None:
        raise ValueError(
            "activations.tier=disk without a directory: write activations.disk=DIR, on a fast "
            "local disk, or leave activations.tier out"
        )
    host, disk = host_bytes, 0 if asked.disk is None else disk_bytes
    if asked.host_memory != "auto":
        host = min(host, asked.host_memory // node.num_devices)
    if asked.disk_memory != "auto":
        disk = min(disk, asked.disk_memory)
    if asked.disk is not None and disk_bytes == 0 and _needs_disk(run, behind_gpu=host_bytes > 0):
        raise MemoryError(
            f"activations.disk={asked.disk}: the disk is full; free space, or name a directory on "
            "another disk"
        )
    return with_disk(replace(node, host_memory_bytes=host * node.num_devices), disk)


def _needs_disk(run: RunConfig, *, behind_gpu: bool) -> bool:
    """Return whether a run explicitly asks for something that is stored on its disk."""
    asked = run.activations
    if asked.tier != "auto" or behind_gpu:
        return asked.tier == "disk"
    offloads = asked.kv == "offload" or asked.policy in ("offload_all", "sppo")
    moves = "disk" in (run.state.weights, run.state.gradients, run.state.optimizer)
    return offloads or moves or asked.offload_ratio not in ("auto", 0)
