"""Making candidates from a run file, given degrees of parallelism and cuts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from sppo.config.run import RunConfig
from sppo.cost.candidate import Candidate
from sppo.cost.layer import Workload
from sppo.cost.trainable import trainable_of_run
from sppo.hardware.description import HardwareSpec
from sppo.planning.search.choices import (
    CHOSEN_UNITS,
    CUT_UNIT,
    MOST_UNITS,
    Degrees,
    activation_tiers,
    asked_schedule,
    cut_sequence,
    machine_asked_for,
    multiplexed_problem,
    places_kv,
    subsequence_counts_to_try,
    subsequence_problem,
    units_problem,
    uses_msp,
    virtual_stages_to_try,
)
from sppo.planning.search.state_choices import state_choices
from sppo.schedule.orders.names import LOOPED
from sppo.schedule.transfers.copies import KVPlacement, WindowedKV

OTHER_SCHEDULES = ("seq_zb_h1", "interleaved_seq1f1b", "sppo_msp")
"""Schedules beside the plain order: zero-bubble, of one stage on a rank; interleaved, of several;
and with units cut over ranks (MSP)."""
_NEITHER = {("seq_zb_h1", True), ("interleaved_seq1f1b", False)}
"""Schedules that there are not, with several stages on a rank and with one."""
_KV_PLACEMENTS: dict[str, KVPlacement | None] = {
    "auto": None,
    "retain": "retained",
    "offload": "offloaded",
    "recompute": "recomputed",
}
_WINDOWED_KV: dict[str, WindowedKV | None] = {
    "auto": None,
    "retain": "retained",
    "offload": "retained",
    "recompute": "recomputed",
}


def candidates_of_degrees(
    run: RunConfig, *, hardware: HardwareSpec, degrees: Degrees
) -> list[Candidate]:
    """Return the candidates with the given degrees, by virtual stages and N, ascending.

    If the run leaves the schedule open, these are in the plain order. Steps of more than
    `CHOSEN_UNITS` are left out, unless all have as many.

    Raises:
        ValueError: Subsequences have fewer tokens than ranks need, or a step has too many units,
            for every N.
    """
    workload = workload_of(run, hardware=hardware, degrees=degrees)
    counts = subsequence_counts_to_try(
        run, hardware=hardware, sequence_parallel=degrees.sequence_parallel
    )
    cuts = [
        cut_sequence(run, num_subsequences=count, num_stages=degrees.pipeline_parallel)
        for count in counts
    ]
    found: list[Candidate] = []
    problem: str | None = None
    by_stages = [
        candidate_of(run, workload, degrees, lengths=cuts[0], virtual_stages=virtual)
        for virtual in virtual_stages_to_try(run, num_ranks=degrees.pipeline_parallel)
    ]
    for one, lengths in product(by_stages, cuts):
        candidate = replace(one, lengths=lengths)
        refused = units_problem(
            candidate, most=CHOSEN_UNITS if found else MOST_UNITS
        ) or subsequence_problem(run, lengths=lengths, degrees=degrees, uses_msp=uses_msp(run))
        if refused is None:
            found.append(candidate)
        problem = problem or refused
    if not found:
        raise ValueError(problem)
    return found


def with_schedule(run: RunConfig, candidate: Candidate, schedule: str) -> Candidate | None:
    """Return a candidate in the plain order with another schedule; None if the run rules it out.

    Only the plain order places K and V off the device, and ranks that share units (MSP) retain
    them. What streams weights or gradients has no schedule but the interleaved one.

    Args:
        run: Validated run configuration.
        candidate: Candidate in the plain order.
        schedule: One of `OTHER_SCHEDULES`.
    """
    asked = asked_schedule(run)
    is_open = asked == "auto" or asked == schedule == "sppo_msp"
    if not is_open or places_kv(run) or candidate.pipeline_parallel_degree == 1:
        return None
    if (schedule, candidate.virtual_stages > 1) in _NEITHER:
        return None
    streams = candidate.state.streams_weights or candidate.state.streams_gradients
    if streams and schedule != "interleaved_seq1f1b":
        return None
    if schedule == "sppo_msp":
        degrees, lengths = Degrees.of_candidate(candidate), candidate.lengths
        if (
            run.parallel.multiplexed == "off"
            or run.activations.kv == "recompute"
            or multiplexed_problem(run, degrees=degrees)
            or subsequence_problem(run, lengths=lengths, degrees=degrees, uses_msp=True)
            or CUT_UNIT * candidate.num_units > CHOSEN_UNITS
        ):
            return None
        candidate = replace(candidate, windowed_kv="retained")
    return replace(candidate, schedule=schedule, kv="retained")


def workload_of(run: RunConfig, *, hardware: HardwareSpec, degrees: Degrees) -> Workload:
    """Return the workload of a run, on the machine with the tiers that the run allows."""
    return Workload(
        run.model,
        machine_asked_for(run, hardware=hardware),
        dtype=run.train.dtype,
        sequence_parallel_degree=degrees.sequence_parallel,
        sequence_parallel=run.parallel.sequence_parallel,
        moments=run.optimizer.moments,
        label_share=run.data.label_share or 1.0,
        trainable=trainable_of_run(run),
    )


def candidate_of(
    run: RunConfig,
    workload: Workload,
    degrees: Degrees,
    *,
    lengths: tuple[int, ...],
    virtual_stages: int = 1,
) -> Candidate:
    """Return the candidate with the given degrees and cuts, and all other choices of the run.

    `auto` becomes the default choice: schedule "sppo", or the looped order with several virtual
    stages; policy "hybrid"; the nearest tiers.
    """
    schedule, policy = asked_schedule(run), run.activations.policy
    automatic = "sppo" if virtual_stages == 1 else LOOPED
    in_loop = (automatic if schedule == "auto" else schedule) == LOOPED and virtual_stages > 1
    ratio = run.activations.offload_ratio
    tier = activation_tiers(run, hardware=workload.hardware)[0]
    has_windows = run.model.has_windows and schedule != "sppo_msp"
    whole_weights = workload.sequence_parallel == "ulysses" or degrees.sequence_parallel == 1
    return Candidate(
        workload,
        lengths,
        sequences=run.train.sequences_per_step // degrees.data_parallel,
        pipeline_parallel_degree=degrees.pipeline_parallel,
        data_parallel_degree=degrees.data_parallel,
        schedule=automatic if schedule == "auto" else schedule,
        policy="hybrid" if policy == "auto" else policy,
        offload_ratio=None if ratio == "auto" else ratio,
        zero=run.parallel.zero,
        state=state_choices(run, hardware=workload.hardware)[0],
        activation_tier=tier,
        input_every=run.activations.input_every,
        background_saves=run.checkpoint.async_save,
        # Without a tier, joining tensors from parts gains nothing.
        allow_partial=whole_weights and tier != "device",
        virtual_stages=virtual_stages,
        kv=_KV_PLACEMENTS[run.activations.kv] if in_loop else "retained",
        windowed_kv=_WINDOWED_KV[run.activations.kv] if has_windows else "retained",
    )
