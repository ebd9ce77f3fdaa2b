"""State of one simulation: times of the actions played and of the results known so far.

The walk of the ranks (:mod:`sppo.schedule.simulation.event_loop`) and their copies
(:mod:`sppo.schedule.simulation.event_loop_copies`) read and set these times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sppo.schedule import encoding
from sppo.schedule.costs import Costs
from sppo.schedule.encoding import (
    D2H,
    D2H_GRADIENTS,
    D2H_KV,
    H2D,
    H2D_GRADIENTS,
    H2D_KV,
    H2D_WEIGHTS,
    KV,
    REDUCE,
    SEND_ACT,
    SEND_GRAD,
    B,
    EncodedProgram,
    F,
    W,
)
from sppo.schedule.msp_costs import msp_seconds
from sppo.schedule.msp_groups import MspGroup
from sppo.schedule.schedule import Schedule

NEVER = -1.0


class SimulationState:
    """State of one simulation. ``at[code * size + slot]`` is the time at which a result exists.

    Args:
        schedule: Schedule that is simulated.
        programs: Encoded programs of the ranks.
        costs: Costs of the actions.
    """

    def __init__(
        self, schedule: Schedule, *, programs: Sequence[EncodedProgram], costs: Costs
    ) -> None:
        self.schedule = schedule
        self.units = schedule.num_units
        self.size = schedule.num_stages * self.units
        self.num_ranks = schedule.num_ranks
        self.rank_of = [schedule.placement.rank_of(s) for s in range(schedule.num_stages)]
        self.first = encoding.first_subsequence(schedule.lengths).tolist()
        self.last = encoding.last_subsequence(schedule.lengths).tolist()
        self.sequence_of = [m for m, s in enumerate(schedule.lengths) for _ in s]
        self._load_programs(programs)
        self._load_costs(costs)
        self._load_msp_groups(programs, costs)
        # Times of results by opcode; the entries of SEND are arrivals of activations and gradients.
        self.at = [NEVER] * (H2D_KV * self.size)
        for unit in range(self.units):
            self.at[SEND_ACT * self.size + unit] = 0.0
            self.at[SEND_GRAD * self.size + self.size - self.units + unit] = 0.0
        self.free = [0.0] * self.num_ranks
        self.waiting: dict[int, int] = {}
        self.woken: list[int] = []

    def _load_programs(self, programs: Sequence[EncodedProgram]) -> None:
        self.codes = [program.codes.tolist() for program in programs]
        self.slots = [program.slots.tolist() for program in programs]
        self.widths = [program.num_shards.tolist() for program in programs]
        self.shards = [program.shards.tolist() for program in programs]
        self.starts = [[0.0] * len(codes) for codes in self.codes]
        self.finishes = [[0.0] * len(codes) for codes in self.codes]
        self.present = {code: bytearray(self.size) for code in (W, D2H, H2D, D2H_KV)}
        sends = False
        for program in programs:
            for code, table in self.present.items():
                for slot in program.slots[program.codes == code].tolist():
                    table[slot] = 1
            sends = sends or bool((program.codes == SEND_ACT).any())
            sends = sends or bool((program.codes == SEND_GRAD).any())
        self.sends_at_once = not sends

    def _load_costs(self, costs: Costs) -> None:
        assert (costs.num_stages, costs.num_units) == (self.schedule.num_stages, self.units), (
            f"costs of {costs.num_stages} stages, {costs.num_units} units for a schedule of "
            f"{self.schedule.num_stages}, {self.units}"
        )
        backward, weight = costs.backward_s.ravel(), costs.weight_s.ravel()
        state_copies = costs.state_copies or costs.copies
        split = [bool(x) for x in self.present[W]]
        fused = (backward + weight).tolist()
        self.seconds = {
            F: costs.forward_s.ravel().tolist(),
            B: [b if s else t for b, s, t in zip(backward.tolist(), split, fused, strict=True)],
            W: weight.tolist(),
            KV: costs.kv_recompute_s.ravel().tolist(),
            D2H: (costs.offload_bytes / costs.copies.d2h_bytes_per_s).ravel().tolist(),
            H2D: (costs.offload_bytes / costs.copies.h2d_bytes_per_s).ravel().tolist(),
            D2H_KV: (costs.kv_offload_bytes / costs.copies.d2h_bytes_per_s).ravel().tolist(),
            H2D_KV: (costs.kv_offload_bytes / costs.copies.h2d_bytes_per_s).ravel().tolist(),
            REDUCE: costs.reduce_s.tolist(),
            H2D_WEIGHTS: (costs.streamed_weight_bytes / state_copies.h2d_bytes_per_s).tolist(),
            D2H_GRADIENTS: (costs.streamed_gradient_bytes / state_copies.d2h_bytes_per_s).tolist(),
            H2D_GRADIENTS: (costs.streamed_gradient_bytes / state_copies.h2d_bytes_per_s).tolist(),
        }
        self.last_reduction_wait_s: list[float] = costs.last_reduction_wait_s.tolist()
        self.message_bytes = costs.message_bytes.tolist()
        self.layer_copies = costs.layer_copies
        self.has_state_queues = costs.state_copies is not None

    def _load_msp_groups(self, programs: Sequence[EncodedProgram], costs: Costs) -> None:
        self.groups: Mapping[int, MspGroup] = {}
        self.msp_seconds: dict[tuple[int, int], float] = {}
        if any(program.is_cut for program in programs):
            self.groups = self.schedule.msp_groups
            self.msp_seconds = msp_seconds(self.schedule, groups=self.groups, costs=costs)

    def set_seconds(self, seconds: Mapping[tuple[int, int], float]) -> None:
        """Replace the seconds of actions, by opcode and slot; an MSP group counts as one action."""
        for key, second in seconds.items():
            if key in self.msp_seconds:
                self.msp_seconds[key] = second
            else:
                self.seconds[key[0]][key[1]] = second

    def publish(self, key: int, time: float) -> None:
        """Set the time of a result, and resume the rank that waits for the result."""
        self.at[key] = time
        if key in self.waiting:
            self.woken.append(self.waiting.pop(key))
