"""Candidate with its placement, memory, costs and step time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sppo.activations.placement import ActivationPlacement
from sppo.cost.candidate import Candidate
from sppo.cost.memory.msp import with_msp
from sppo.cost.memory.rank_program import holds_messages, with_messages_held
from sppo.cost.memory.stage_memory import StageMemory
from sppo.cost.memory.tier_memory import most_tier_bytes, node_host_bytes
from sppo.cost.step_time import StepTime
from sppo.planning.search.choices import Degrees
from sppo.planning.search.shortfall import Shortfall, find_shortfall
from sppo.planning.search.step_prices import StepPrices
from sppo.schedule.costs import Costs
from sppo.schedule.program import with_messages
from sppo.schedule.schedule import Schedule
from sppo.schedule.simulation.simulated_step import SimulatedStep
from sppo.schedule.transfers.kv_placement import KVPlacement


@dataclass(frozen=True, slots=True, eq=False)
class EvaluatedCandidate:
    """Candidate with its placement, memory, costs and step time.

    Attributes:
        candidate: The candidate.
        prices: Costs of the step under the placement of its activations.
        memory: Memory of one device of each pipeline rank.
        shortfall: Memory that the candidate lacks; None if it fits.
        simulated: Simulated step; None if only the closed form was computed.
        program: Program without messages, made for MSP, whose memory depends on it; None otherwise.
    """

    candidate: Candidate
    prices: StepPrices
    memory: tuple[StageMemory, ...]
    shortfall: Shortfall | None
    simulated: SimulatedStep | None = None
    program: Schedule | None = None

    @property
    def placement(self) -> ActivationPlacement:
        """Placement of the saved tensors."""
        return self.prices.placement

    @property
    def costs(self) -> Costs:
        """Cost tables of the step, for the simulator."""
        return self.prices.costs

    @property
    def time(self) -> StepTime:
        """Time of the step, in closed form."""
        return self.prices.time

    @property
    def step_s(self) -> float:
        """Seconds of the step: simulated if available, otherwise in closed form."""
        return self.time.step_s if self.simulated is None else self.simulated.step_s

    @property
    def degrees(self) -> Degrees:
        """Degrees of parallelism of the candidate."""
        return Degrees.of_candidate(self.candidate)

    def executed_program(self) -> Schedule:
        """Return the program of the step, with messages."""
        if self.program is None:
            return self.candidate.program(self.costs)
        return with_messages(self.program, costs=self.costs)

    @property
    def device_peak_bytes(self) -> int:
        """Peak bytes of the fullest device."""
        return max(rank.device.total_bytes for rank in self.memory)

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
