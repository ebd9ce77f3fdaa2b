"""Candidate with a placement; memory, costs and times of its step follow from these."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from sppo.activations.placement import ActivationPlacement
from sppo.cost.candidate import Candidate
from sppo.cost.memory.copy_room import with_placement
from sppo.cost.memory.program_memory import holds_messages, with_program
from sppo.cost.memory.stage_memory import StageMemory, most_tier_bytes, node_host_bytes
from sppo.cost.memory.state_memory import state_memory
from sppo.cost.stages.stage_cost import stage_costs
from sppo.cost.step_time import StepTime, step_time
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


def has_own_memory(candidate: Candidate) -> bool:
    """Return whether the memory of a candidate depends on its program, which takes long to make.

    It does if units are cut (MSP), and on a CPU, where messages wait in memory.
    """
    return candidate.schedule == "sppo_msp" or holds_messages(candidate)


@dataclass(frozen=True, eq=False)
class EvaluatedCandidate:
    """Candidate with a placement, and the memory, costs and times of its step.

    These are computed when they are first asked for.

    Attributes:
        candidate: The candidate.
        placement: Placement of the saved tensors.
        counts_program: Whether its memory is counted from its program if it depends on that
            (:func:`has_own_memory`). If not, ranks are taken to run their own units whole, beside
            the messages of the running unit.
    """

    candidate: Candidate
    placement: ActivationPlacement
    counts_program: bool = True

    @cached_property
    def costs(self) -> Costs:
        """Cost tables of the step, for the simulator."""
        return stage_costs(self.candidate, self.placement)

    @cached_property
    def time(self) -> StepTime:
        """Time of the step, in closed form.

        An interleaved schedule with several stages on a rank counts as looped: it takes as long for
        one group of sequences, and overlaps several groups.
        """
        candidate = self.candidate
        is_looped = candidate.schedule == LOOPED or candidate.virtual_stages > 1
        ranks = candidate.pipeline_parallel_degree if is_looped else None
        return step_time(
            self.costs,
            num_sequences=candidate.sequences,
            looped_ranks=ranks,
            forward_only_stages=candidate.forward_only_stages,
        )

    @cached_property
    def program(self) -> Schedule:
        """Program of the step, without messages."""
        return self.candidate.program(self.costs, messages=False)

    def executed_program(self) -> Schedule:
        """Return the program of the step, with messages."""
        return with_messages(self.program, costs=self.costs)

    @cached_property
    def memory(self) -> tuple[StageMemory, ...]:
        """Memory of one device of each pipeline rank."""
        candidate, placement = self.candidate, self.placement
        memory = with_placement(state_memory(candidate), candidate=candidate, placement=placement)
        if self.counts_program and has_own_memory(candidate):
            program = self.executed_program() if holds_messages(candidate) else self.program
            memory = with_program(
                memory, candidate=candidate, placement=placement, schedule=program
            )
        return memory

    @cached_property
    def shortfall(self) -> Shortfall | None:
        """Memory that the candidate lacks; None if it fits."""
        return find_shortfall(self.candidate, self.memory)

    @cached_property
    def simulated(self) -> SimulatedStep:
        """Simulated step."""
        return simulate_step(self.program, costs=self.costs)

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
