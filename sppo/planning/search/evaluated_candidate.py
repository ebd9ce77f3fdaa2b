"""Candidate with its placement and memory; costs and times of its step follow from these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sppo.activations.placement import ActivationPlacement
from sppo.cost.candidate import Candidate
from sppo.cost.memory.program_memory import holds_messages, with_messages_held, with_msp
from sppo.cost.memory.stage_memory import StageMemory, most_tier_bytes, node_host_bytes
from sppo.cost.stage_cost import StageSeconds, stage_costs
from sppo.cost.step_time import StepTime, step_times
from sppo.planning.search.choices import Degrees
from sppo.planning.search.shortfall import Shortfall, find_shortfall
from sppo.schedule.costs import Costs
from sppo.schedule.orders.names import LOOPED
from sppo.schedule.program import with_messages
from sppo.schedule.schedule import Schedule
from sppo.schedule.simulation.simulate import SimulatedStep, simulate_step
from sppo.schedule.transfers.copies import KVPlacement

_IN_TIMELINES = ("kv_bytes", "kv_gradients_bytes", "activations_bytes")
"""Memory buckets that a simulation tracks over time; the others are constant during a step."""


@dataclass(frozen=True, eq=False)
class EvaluatedCandidate:
    """Candidate with its placement and memory, and the costs and times of its step.

    Costs and times are computed when they are first asked for.

    Attributes:
        candidate: The candidate.
        seconds: Seconds of the candidate's units, with everything retained.
        placement: Placement of the saved tensors.
        memory: Memory of one device of each pipeline rank.
        shortfall: Memory that the candidate lacks; None if it fits.
        program: Program without messages, made for MSP, whose memory depends on it; None otherwise.
    """

    candidate: Candidate
    seconds: StageSeconds
    placement: ActivationPlacement
    memory: tuple[StageMemory, ...]
    shortfall: Shortfall | None
    program: Schedule | None = None

    @cached_property
    def costs(self) -> Costs:
        """Cost tables of the step, for the simulator."""
        return stage_costs(self.candidate, seconds=self.seconds, placement=self.placement)

    @cached_property
    def time(self) -> StepTime:
        """Time of the step, in closed form."""
        return closed_forms(self.candidate, [self.costs])[0]

    @cached_property
    def simulated(self) -> SimulatedStep:
        """Simulated step."""
        program = self.program or self.candidate.program(self.costs, messages=False)
        return simulate_step(program, costs=self.costs)

    @property
    def step_s(self) -> float:
        """Simulated seconds of the step."""
        return self.simulated.step_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all replicas."""
        candidate = self.candidate
        replicas = candidate.sequences * candidate.data_parallel_degree
        return sum(candidate.lengths) * replicas / self.step_s

    @property
    def degrees(self) -> Degrees:
        """Degrees of parallelism of the candidate."""
        return Degrees.of_candidate(self.candidate)

    def executed_program(self) -> Schedule:
        """Return the program of the step, with messages."""
        if self.program is None:
            return self.candidate.program(self.costs)
        return with_messages(self.program, costs=self.costs)

    def case(self) -> tuple[Schedule, Costs]:
        """Return the program of the step, with its costs."""
        return self.executed_program(), self.costs

    @property
    def device_peak_bytes(self) -> int:
        """Peak bytes of the fullest device."""
        return max(rank.device.total_bytes for rank in self.memory)

    @property
    def simulated_bytes(self) -> tuple[int, ...]:
        """Simulated peak bytes of one device of each rank, at most those of its memory."""
        held = self.simulated.held_bytes.tolist()
        return tuple(
            steady + round(own) for steady, own in zip(self.steady_bytes, held, strict=True)
        )

    @property
    def steady_bytes(self) -> tuple[int, ...]:
        """Bytes of one device of each rank that a simulation does not track.

        State, slots of copies, and working sets, each by as much as it raises the peak of what is
        held.
        """
        return tuple(
            rank.device.total_bytes - sum(int(getattr(rank.device, name)) for name in _IN_TIMELINES)
            for rank in self.memory
        )

    @property
    def host_peak_bytes(self) -> int:
        """Peak bytes of host memory of the device that uses most of it."""
        return most_tier_bytes(self.memory, "host", candidate=self.candidate)

    @property
    def disk_peak_bytes(self) -> int:
        """Peak bytes of disk space of the device that uses most of it."""
        return most_tier_bytes(self.memory, "disk", candidate=self.candidate)

    @property
    def node_host_bytes(self) -> int:
        """Peak bytes of host memory of all devices of one node together; 0 on a CPU."""
        return node_host_bytes(self.memory, candidate=self.candidate)

    @property
    def kv(self) -> KVPlacement:
        """Placement of K and V on the first stage; the last stage of each rank retains them."""
        return self.candidate.kv_of_stages[0]

    @property
    def short_bytes(self) -> int:
        """Bytes of memory that the candidate lacks; 0 if it fits."""
        return 0 if self.shortfall is None else self.shortfall.short_bytes

    @property
    def effective_policy(self) -> str:
        """Activation policy in effect: "retain" if nothing is offloaded or recomputed."""
        if self.placement.offloaded.any() or self.placement.recomputed.any():
            return self.candidate.policy
        return "retain"


def closed_forms(candidate: Candidate, costs: Sequence[Costs]) -> list[StepTime]:
    """Return the times of a candidate's step with several cost tables, in closed form.

    An interleaved schedule with several stages on a rank counts as looped: it takes as long for one
    group of sequences, and overlaps several groups.
    """
    is_looped = candidate.schedule == LOOPED or candidate.virtual_stages > 1
    return step_times(
        costs,
        num_sequences=candidate.sequences,
        looped_ranks=candidate.pipeline_parallel_degree if is_looped else None,
    )


def with_program(evaluated: EvaluatedCandidate) -> EvaluatedCandidate:
    """Return an evaluated candidate with its memory under its program, which cuts units (MSP).

    Args:
        evaluated: Evaluated candidate, with the memory of ranks that run their own units whole.
    """
    candidate = evaluated.candidate
    program = candidate.program(evaluated.costs, messages=False)
    memory = with_msp(
        evaluated.memory, candidate=candidate, placement=evaluated.placement, schedule=program
    )
    return replace(
        evaluated, memory=memory, shortfall=find_shortfall(candidate, memory), program=program
    )


def with_executed_program(evaluated: EvaluatedCandidate) -> EvaluatedCandidate:
    """Return an evaluated candidate with its memory under the program that is executed.

    Until then the memory includes the messages of the running unit, whatever the order of messages;
    the program may hold more of them, or fewer.
    """
    candidate = evaluated.candidate
    if not holds_messages(candidate):
        return evaluated
    memory = with_messages_held(
        evaluated.memory,
        candidate=candidate,
        placement=evaluated.placement,
        schedule=evaluated.executed_program(),
    )
    return replace(evaluated, memory=memory, shortfall=find_shortfall(candidate, memory))
