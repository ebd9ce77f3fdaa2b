"""What comes of a candidate: time, memory, whether it fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from sppo.activations.hybrid import choices
from sppo.activations.placement import ActivationPlacement, Counts, PolicyInputs
from sppo.activations.policy import POLICIES, decide, decide_ratio, seconds_added
from sppo.cost.candidate import Candidate
from sppo.cost.copy_room import (
    copy_slots,
    ring_share,
    tier_padding_bytes,
    with_exact_room,
)
from sppo.cost.layer import exchange_seconds
from sppo.cost.memory import (
    StageMemory,
    borrower_bytes,
    state_memory,
    with_activations,
)
from sppo.cost.stage_cost import (
    StageSeconds,
    copy_bytes_per_s,
    row_bytes_of,
    stage_costs,
    stage_seconds,
)
from sppo.cost.step_time import StepTime, step_time
from sppo.planning.choices import Degrees
from sppo.schedule.actions import ActionKind
from sppo.schedule.costs import Costs, Table
from sppo.schedule.generators import generate
from sppo.schedule.timeline import Timeline

OVERLAPPING = ("sppo", "sppo_msp", "seq1f1b", "1f1b")
"""Schedules that hold N + p - 1 - r units on rank r of p (Seq1F1B, section 3)."""


@dataclass(frozen=True, slots=True)
class Shortfall:
    """The stage that lacks most memory, and of what.

    Attributes:
        place: "device", "host" or "disk".
        stage: Which stage.
        bucket: The largest bucket there, without "_bytes".
        bucket_bytes: What it takes.
        needed_bytes: All buckets together.
        available_bytes: What there is.
    """

    place: str
    stage: int
    bucket: str
    bucket_bytes: int
    needed_bytes: int
    available_bytes: int

    @property
    def short_bytes(self) -> int:
        """Bytes by which it does not fit."""
        return self.needed_bytes - self.available_bytes


@dataclass(frozen=True, slots=True, eq=False)
class EvaluatedCandidate:
    """What a candidate comes to.

    Attributes:
        candidate: What was assessed.
        placement: Of its activation policy.
        memory: Of each stage.
        time: Of a step, in closed form.
        costs: Tables to simulate it with.
        shortfall: Why it does not fit; None where it does.
        timeline: Its simulation; None where only the closed form was computed.
    """

    candidate: Candidate
    placement: ActivationPlacement
    memory: tuple[StageMemory, ...]
    time: StepTime
    costs: Costs
    shortfall: Shortfall | None
    timeline: Timeline | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a step: simulated where that was done, else in closed form."""
        return self.time.step_s if self.timeline is None else self.timeline.makespan_s

    @property
    def degrees(self) -> Degrees:
        """How the devices are divided."""
        candidate = self.candidate
        return Degrees(
            candidate.data_parallel_degree,
            candidate.pipeline_parallel_degree,
            candidate.workload.sequence_parallel_degree,
        )

    @property
    def device_peak_bytes(self) -> int:
        """Peak bytes of the fullest device."""
        return max(stage.device.total_bytes for stage in self.memory)

    @property
    def tier_peak_bytes(self) -> int:
        """Peak bytes in the tier behind the fullest device, optimizer states included."""
        return max(s.tier_activations_bytes + s.host_optimizer_bytes for s in self.memory)

    @property
    def effective_policy(self) -> str:
        """The policy by what it does: a hybrid that keeps everything is "retain"."""
        if self.placement.offloaded.any() or self.placement.recomputed.any():
            return self.candidate.policy
        return "retain"


def assess(candidate: Candidate, *, seconds: StageSeconds | None = None) -> EvaluatedCandidate:
    """Price `candidate` and see whether it fits.

    Args:
        candidate: what to assess.
        seconds: of its candidate, where they are known already.

    Raises:
        ValueError: more stages than layers, or a policy the machine cannot serve.
    """
    hardware = candidate.workload.hardware
    if candidate.offload_optimizer and not hardware.node.host_memory_bytes:
        raise ValueError(
            f"optimizer.offload keeps optimizer states in host memory, and {hardware.name} has "
            "none beside its devices': write optimizer.offload=false"
        )
    seconds = seconds or stage_seconds(candidate)
    in_flight = in_flight_counts(candidate)
    states = state_memory(
        candidate, in_flight=in_flight, offload_optimizer=candidate.offload_optimizer
    )
    if candidate.schedule == "sppo_msp":
        states = _with_borrowers(states, extra=borrower_bytes(candidate))
    inputs = _inputs(candidate, seconds=seconds, in_flight=in_flight, states=states)

    def memory_of(placement: ActivationPlacement) -> tuple[StageMemory, ...]:
        return with_exact_room(
            with_activations(states, candidate=candidate, placement=placement, inputs=inputs),
            candidate=candidate,
            placement=placement,
            in_flight=in_flight,
        )

    possible = [*_placements(candidate, inputs)]
    if candidate.policy == "hybrid" and candidate.offload_ratio is None:
        # The room that hybrid decides in allows for the working set of any placement, also one
        # that recomputes. Placements that cost no time are tried with their own.
        free_policies = ["retain"]
        if inputs.copy_bytes_per_s > 0 and all(seconds_added(d, inputs) for d in possible):
            free_policies.append("sppo")
        for policy in free_policies:
            placement = decide(policy, inputs)
            if _shortfall(candidate, memory_of(placement)) is None:
                possible = [placement]
                break
    priced = []
    for placement in possible:
        costs = stage_costs(candidate, seconds=seconds, placement=placement)
        priced.append((step_time(costs, num_sequences=candidate.sequences), placement, costs))
    found = []
    for time, placement, costs in sorted(priced, key=lambda item: item[0].step_s):
        memory = memory_of(placement)
        shortfall = _shortfall(candidate, memory)
        found.append(EvaluatedCandidate(candidate, placement, memory, time, costs, shortfall))
        if shortfall is None:
            break
    return min(found, key=_short_bytes)


def _short_bytes(evaluated: EvaluatedCandidate) -> int:
    """0 where it fits."""
    return 0 if evaluated.shortfall is None else evaluated.shortfall.short_bytes


def _placements(candidate: Candidate, inputs: PolicyInputs) -> Iterable[ActivationPlacement]:
    """What the activation policy may decide; of several the fastest is meant."""
    policy, ratio = candidate.policy, candidate.offload_ratio
    if ratio is not None:
        if ratio > 0 and policy in POLICIES:
            raise ValueError(
                f"activations.offload_ratio {ratio:g} with activations.policy {policy!r}, which "
                "offloads nothing: leave one of the two keys out"
            )
        return [decide_ratio(inputs, ratio=ratio)]
    return choices(inputs) if policy == "hybrid" else [decide(policy, inputs)]


def leaves_room(candidate: Candidate) -> bool:
    """Whether it fits without any saved activation: quick to tell, and most do not."""
    states = state_memory(
        candidate,
        in_flight=in_flight_counts(candidate),
        offload_optimizer=candidate.offload_optimizer,
    )
    budget = candidate.budget_bytes
    return all(state.device.total_bytes <= budget for state in states)


def _with_borrowers(states: tuple[StageMemory, ...], *, extra: int) -> tuple[StageMemory, ...]:
    """Every rank of a multiplexed schedule helps others."""
    return tuple(
        replace(
            state,
            device=replace(
                state.device, communication_bytes=state.device.communication_bytes + extra
            ),
        )
        for state in states
    )


def in_flight_counts(candidate: Candidate) -> Counts:
    """How often each subsequence is held on each stage when most tokens are, [stages, N].

    Rank r of p holds N + p - 1 - r units: after j backwards the first N - j of one sequence, and
    the first p - 1 - r + j of those that follow it. The first are the longest where cuts share
    FLOPs, so the worst moment is in the middle of a backward.
    """
    ranks, count = candidate.pipeline_parallel_degree, len(candidate.lengths)
    if candidate.schedule not in OVERLAPPING:
        return _walked_counts(candidate)
    # A single rank runs one sequence after another.
    following = 0 if ranks == 1 else count * (candidate.sequences - 1)
    before = np.concatenate([[0], np.cumsum(candidate.lengths)])
    done = np.arange(count + 1)
    stages = []
    for rank in range(ranks):
        ahead = np.minimum(ranks - 1 - rank + done, following)
        held = before[count - done] + ahead // count * before[-1] + before[ahead % count]
        worst = int(np.argmax(held))
        whole, rest = divmod(int(ahead[worst]), count)
        stages.append([whole + (n < rest) + (n < count - worst) for n in range(count)])
    return np.array(stages, dtype=np.int64)


def _walked_counts(candidate: Candidate) -> Counts:
    """Units in flight under any schedule, counted along its programs."""
    schedule = generate(
        candidate.schedule,
        num_ranks=candidate.pipeline_parallel_degree,
        lengths=(candidate.lengths,) * candidate.sequences,
    )
    shape = (candidate.pipeline_parallel_degree, len(candidate.lengths))
    most = np.zeros(shape, dtype=np.int64)
    for program in schedule.programs:
        splits = any(action.kind is ActionKind.W for action in program)
        releases = ActionKind.W if splits else ActionKind.B
        held = np.zeros(shape, dtype=np.int64)
        for action in program:
            if action.kind not in (ActionKind.F, releases):
                continue
            place = action.stage, action.subsequence
            held[place] += 1 if action.kind is ActionKind.F else -1
            most[place] = max(most[place], held[place])
    return most


def _inputs(
    candidate: Candidate,
    *,
    seconds: StageSeconds,
    in_flight: Counts,
    states: tuple[StageMemory, ...],
) -> PolicyInputs:
    """What the activation policy decides from."""
    hardware = candidate.workload.hardware
    count = len(candidate.lengths)
    tokens = np.array(candidate.lengths, dtype=np.int64)
    layers = np.array([len(stage) for stage in candidate.stages], dtype=np.float64)
    exchange = exchange_seconds(candidate.workload, tokens=tokens.astype(np.float64))
    exchange = layers[:, None] * exchange
    units = seconds.units
    forward = _following(units.forward[:, :count] - exchange)
    backward = _following((units.backward + units.weight)[:, :count] - exchange)
    out, back = copy_bytes_per_s(candidate)
    used = np.array([state.device.total_bytes for state in states], dtype=np.float64)
    host = np.array([state.host_optimizer_bytes for state in states], dtype=np.float64)
    on_host = hardware.node.host_memory_bytes > 0
    tier = hardware.host_bytes_per_device if on_host else hardware.disk_bytes_per_device
    tier_used = tier_padding_bytes(candidate, in_flight=in_flight) + (host if on_host else 0)
    return PolicyInputs(
        tokens=tokens,
        row_bytes=row_bytes_of(candidate),
        in_flight=in_flight,
        ring_share=ring_share(candidate),
        next_forward_s=forward,
        hidden_bytes=np.minimum(forward * out, backward * back),
        linear_recompute_s=seconds.units.linear_recompute[:, :count],
        attention_recompute_s=seconds.units.attention_recompute[:, :count],
        copy_bytes_per_s=min(out, back),
        device_bytes=np.maximum(0.0, candidate.budget_bytes - used),
        tier_bytes=np.maximum(0.0, tier - tier_used),
        allow_partial=candidate.allow_partial,
        slots=copy_slots(candidate),
    )


def _following(seconds: Table) -> Table:
    """Seconds of the next subsequence of a sequence; for the last one, its own."""
    following: Table = np.concatenate([seconds[:, 1:], seconds[:, -1:]], axis=1)
    return following


def _shortfall(candidate: Candidate, memory: tuple[StageMemory, ...]) -> Shortfall | None:
    hardware = candidate.workload.hardware
    found = []
    for stage, held in enumerate(memory):
        device = held.device
        bucket = device.largest
        found.append(
            Shortfall(
                "device",
                stage,
                bucket.removesuffix("_bytes"),
                getattr(device, bucket),
                device.total_bytes,
                candidate.budget_bytes,
            )
        )
        on_host = hardware.node.host_memory_bytes > 0
        room = hardware.host_bytes_per_device if on_host else hardware.disk_bytes_per_device
        tier = held.tier_activations_bytes + (held.host_optimizer_bytes if on_host else 0)
        found.append(
            Shortfall(
                "host" if on_host else "disk",
                stage,
                "offloaded activations",
                held.tier_activations_bytes,
                tier,
                room,
            )
        )
    worst = max(found, key=lambda shortfall: shortfall.short_bytes)
    return worst if worst.short_bytes > 0 else None
