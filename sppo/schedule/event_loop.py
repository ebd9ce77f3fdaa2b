"""The clock of the simulator: when each action of each rank starts and ends.

Every resource serves its actions in program order: a rank's compute, its two copy engines, its
reductions, and each directed link. So the start of an action is the latest of what it waits for,
and no event queue is needed: a rank is walked until it waits for something that has no time yet,
and taken up again when that gets one.

What an action waits for, beside its resource:

* F: the F of the subsequence before it (K/V), and the activation from the stage before it;
* B: its F, the B of the subsequence behind it (dK/dV), the gradient from the stage behind it, and
  its H2D if the program has one; W: its B; KV: its F;
* D2H: its F; H2D: its D2H, and the compute in front of it in the program, which frees its room;
  where copies flow layer by layer, see `_wait_for_copies`; those of K and V: see `_bring_kv_back`;
* copies of a whole stage's weights or gradients: the compute in front of them; those that go wait
  for its REDUCE, too, and compute of the stage for those that come;
* SEND: the compute in front of it. Programs without SEND send as soon as a tensor exists. RECV
  costs nothing: the message has arrived or it has not.
* a shard of an MSP group: all that its unit waits for, on all ranks of the MSP group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sppo.schedule import encoding
from sppo.schedule.actions import STAGES_HELD, Schedule
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
    NUM_COMPUTE,
    RECV_ACT,
    RECV_GRAD,
    REDUCE,
    SEND_ACT,
    SEND_GRAD,
    B,
    EncodedProgram,
    F,
    W,
)
from sppo.schedule.msp_groups import MspGroup, Route, find_msp_groups, msp_routes, msp_seconds

_NEVER = -1.0
BUBBLE, COMMUNICATION, COPY = range(3)
IdleGap = tuple[float, float, int]


class DeadlockError(ValueError):
    """No rank can go on: the order of the programs contradicts itself.

    Attributes:
        rank: The first rank that stands.
        index: The position in its program where it stands, from 0.
    """

    def __init__(self, problem: str, *, rank: int, index: int) -> None:
        super().__init__(problem)
        self.rank = rank
        self.index = index


@dataclass(frozen=True, slots=True)
class Clock:
    """Times of all actions, by rank and position in its program, and each rank's idle gaps.

    Gaps are (from, to, BUBBLE or COMMUNICATION or COPY) in seconds; the time behind a rank's
    last compute action is not among them.
    """

    starts_s: Sequence[Sequence[float]]
    finishes_s: Sequence[Sequence[float]]
    gaps: Sequence[Sequence[IdleGap]]


def run_clock(schedule: Schedule, *, programs: Sequence[EncodedProgram], costs: Costs) -> Clock:
    """Play `schedule` once.

    Raises:
        DeadlockError: actions wait for each other in a circle; names them.
    """
    loop = _EventLoop(schedule, programs=programs, costs=costs)
    loop.run()
    return Clock(loop.starts, loop.finishes, loop.gaps)


class _EventLoop:
    """State of one simulation. `at[code * size + slot]` is when that result exists."""

    def __init__(
        self, schedule: Schedule, *, programs: Sequence[EncodedProgram], costs: Costs
    ) -> None:
        self.schedule = schedule
        self.units = schedule.num_units
        self.size = schedule.num_stages * self.units
        self.num_ranks = schedule.num_ranks
        self.rank_of = [schedule.placement.rank_of(s) for s in range(schedule.num_stages)]
        self.first = encoding.first_subsequence(schedule).tolist()
        self.last = encoding.last_subsequence(schedule).tolist()
        self.sequence_of = [m for m, s in enumerate(schedule.lengths) for _ in s]
        self._load_programs(programs)
        self._load_costs(costs)
        self._load_msp_groups(programs, costs)
        # Results by opcode; at those of SEND the arrivals of activations and gradients.
        self.at = [_NEVER] * (H2D_KV * self.size)
        for unit in range(self.units):
            self.at[SEND_ACT * self.size + unit] = 0.0
            self.at[SEND_GRAD * self.size + self.size - self.units + unit] = 0.0
        self.free = [0.0] * self.num_ranks
        self.engine_free = {D2H: [0.0] * self.num_ranks, H2D: [0.0] * self.num_ranks}
        self.block_out_s = [0.0] * self.num_ranks
        self.reload: dict[tuple[int, int], tuple[int, float]] = {}
        self.kv_back: list[list[tuple[int, int, float]]] = [[] for _ in range(self.num_ranks)]
        self.last_backward: dict[int, tuple[float, float]] = {}
        self.reduce_free = [0.0] * self.num_ranks
        self.weights_held: list[list[int]] = [[] for _ in range(self.num_ranks)]
        self.stage_here = [0.0] * self.schedule.num_stages
        self.gradients_gone = [0.0] * self.schedule.num_stages
        self.link_free: dict[int, float] = {}
        self.position = [0] * self.num_ranks
        self.waiting: dict[int, int] = {}
        self.woken: list[int] = []
        self.gathered: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.gaps: list[list[IdleGap]] = [[] for _ in range(self.num_ranks)]

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
            H2D_WEIGHTS: (costs.streamed_weight_bytes / costs.copies.h2d_bytes_per_s).tolist(),
            D2H_GRADIENTS: (costs.streamed_gradient_bytes / costs.copies.d2h_bytes_per_s).tolist(),
            H2D_GRADIENTS: (costs.streamed_gradient_bytes / costs.copies.h2d_bytes_per_s).tolist(),
        }
        self.message_bytes = costs.message_bytes.tolist()
        self.links = costs.links
        self.layer_copies = costs.layer_copies

    def _load_msp_groups(self, programs: Sequence[EncodedProgram], costs: Costs) -> None:
        self.groups: Mapping[int, MspGroup] = {}
        self.routes: Mapping[tuple[int, int], tuple[Route, ...]] = {}
        self.msp_seconds: Mapping[tuple[int, int], float] = {}
        if any(program.is_cut for program in programs):
            self.groups = find_msp_groups(self.schedule, programs=programs)
            self.routes = msp_routes(self.schedule, groups=self.groups)
            self.msp_seconds = msp_seconds(self.schedule, groups=self.groups, costs=costs)
        self.latest: dict[tuple[int, int], float] = {}
        self.outstanding = {key: len(routes) for key, routes in self.routes.items()}

    def run(self) -> None:
        """Walk every rank to the end of its program."""
        handlers: list[Callable[[int, int, int, int], bool]] = [self._compute] * NUM_COMPUTE
        handlers += [self._copy, self._copy, self._send, self._send]
        handlers += [self._receive, self._receive, self._copy_kv_out, self._permit_kv_back]
        handlers += [self._reduce]
        handlers += [self._fetch_weights, self._copy_gradients_out, self._bring_gradients_back]
        self.woken = list(range(self.num_ranks - 1, -1, -1))
        while self.woken:
            rank = self.woken.pop()
            codes, slots, position = self.codes[rank], self.slots[rank], self.position
            while position[rank] < len(codes):
                index = position[rank]
                code = codes[index]
                if not handlers[code](rank, index, code, slots[index]):
                    break
                position[rank] += 1
        standing = [r for r in range(self.num_ranks) if self.position[r] < len(self.codes[r])]
        if standing:
            first = standing[0]
            raise DeadlockError(self._deadlock(), rank=first, index=self.position[first])

    def _compute(self, rank: int, index: int, code: int, slot: int) -> bool:
        group = self.widths[rank][index] > 1
        if group and not self._msp_group_is_complete(rank, index, code, slot):
            return False
        ready = self._ready(rank, code, slot)
        if ready is None:
            return False
        if group:
            return self._start_msp_group(rank, code, slot, ready)
        seconds = self.seconds[code][slot]
        ready = (ready[0], ready[1], max(ready[2], self.stage_here[slot // self.units]))
        if self.layer_copies:
            start = max(self.free[rank], *ready)
            waited = self._wait_for_copies(rank, code, slot, start, seconds, 1)
            ready = (ready[0], ready[1], max(ready[2], waited))
        if code == B and self.kv_back[rank]:
            waited = self._bring_kv_back(rank, slot, max(self.free[rank], *ready), seconds)
            ready = (ready[0], ready[1], max(ready[2], waited))
        finish = self._occupy(rank, index, ready, seconds)
        self._finished(rank, code, slot, finish)
        return True

    def _ready(self, rank: int, code: int, slot: int) -> tuple[float, float, float] | None:
        """When the inputs were computed, arrived by message, were copied back; None to wait."""
        at, size = self.at, self.size
        produced = 0.0
        for key in self._needs(code, slot):
            time = at[key]
            if time < 0:
                self.waiting[key] = rank
                return None
            if time > produced:
                produced = time
        arrived = copied = 0.0
        if code in (F, B):
            key = (SEND_ACT if code == F else SEND_GRAD) * size + slot
            arrived = at[key]
            if arrived < 0:
                self.waiting[key] = rank
                return None
        if code == B and self.present[H2D][slot]:
            copied = at[H2D * size + slot]
            if copied < 0:
                self.waiting[H2D * size + slot] = rank
                return None
        return produced, arrived, copied

    def _needs(self, code: int, slot: int) -> list[int]:
        """Results of other compute actions that this one reads."""
        size, units = self.size, self.units
        needs = []
        if code == F:
            if not self.first[slot % units]:
                needs.append(slot - 1)
            if slot >= units:
                needs.append(slot - units)
        elif code == B:
            needs.append(slot)
            if not self.last[slot % units]:
                needs.append(size + slot + 1)
            if slot < size - units:
                needs.append(size + slot + units)
        else:
            needs.append(slot if code == KV else size + slot)
        return needs

    def _occupy(
        self, rank: int, index: int, ready: tuple[float, float, float], seconds: float
    ) -> float:
        """Run an action on a rank's compute queue and book the gap before it; its end."""
        free = self.free[rank]
        produced, arrived, copied = ready
        start = max(free, produced, arrived, copied)
        if start > free:
            gaps = self.gaps[rank]
            computed = max(free, produced)
            delivered = max(computed, arrived)
            if computed > free:
                gaps.append((free, computed, BUBBLE))
            if delivered > computed:
                gaps.append((computed, delivered, COMMUNICATION))
            if start > delivered:
                gaps.append((delivered, start, COPY))
        finish = start + seconds
        self.starts[rank][index] = start
        self.finishes[rank][index] = self.free[rank] = finish
        return finish

    def _finished(self, rank: int, code: int, slot: int, finish: float) -> None:
        """Make a compute result known, and pass it on if no SEND in the program does."""
        self._publish(code * self.size + slot, finish)
        if code == F and slot < self.size - self.units:
            wire, target = SEND_ACT, slot + self.units
        elif code == B and slot >= self.units:
            wire, target = SEND_GRAD, slot - self.units
        else:
            return
        if (wire, slot) in self.routes:
            if self.sends_at_once:
                for shard, route in enumerate(self.routes[wire, slot]):
                    self._deliver(route, wire, slot, shard, finish)
            else:
                for route in self.routes[wire, slot]:
                    if route.sender == route.receiver:
                        self._delivered(wire, slot, finish)
            return
        receiver = self.rank_of[target // self.units]
        if receiver == rank:
            self._publish(wire * self.size + target, finish)
        elif self.sends_at_once:
            size_bytes = self.message_bytes[slot % self.units]
            _, arrival = self._transfer(rank, receiver, size_bytes, finish)
            self._publish(wire * self.size + target, arrival)

    def _publish(self, key: int, time: float) -> None:
        self.at[key] = time
        if key in self.waiting:
            self.woken.append(self.waiting.pop(key))

    def _transfer(
        self, sender: int, receiver: int, size_bytes: float, ready: float
    ) -> tuple[float, float]:
        """Put a message on its link; when it starts and when it has arrived."""
        link = self.links.link(sender, receiver=receiver)
        edge = sender * self.num_ranks + receiver
        start = max(ready, self.link_free.get(edge, 0.0))
        sent = start + size_bytes / link.bytes_per_s
        self.link_free[edge] = sent
        return start, sent + link.latency_s

    def _deliver(
        self, route: Route, wire: int, slot: int, shard: int, ready: float
    ) -> tuple[float, float]:
        """Move one message of an MSP group; the unit has arrived when all of them have."""
        if route.sender == route.receiver:
            self._delivered(wire, slot, ready)
            return ready, ready
        size_bytes = self.message_bytes[slot % self.units] * route.share
        start, arrival = self._transfer(route.sender, route.receiver, size_bytes, ready)
        self._delivered(wire, slot, arrival)
        return start, arrival

    def _delivered(self, wire: int, slot: int, arrival: float) -> None:
        """Count one message of an MSP group; the last one makes the whole tensor known."""
        key = (wire, slot)
        self.outstanding[key] -= 1
        self.latest[key] = max(arrival, self.latest.get(key, 0.0))
        if not self.outstanding[key]:
            step = self.units if wire == SEND_ACT else -self.units
            self._publish(wire * self.size + slot + step, self.latest[key])

    def _msp_group_is_complete(self, rank: int, index: int, code: int, slot: int) -> bool:
        """Note that `rank` came to its shard; return whether its whole MSP group has."""
        members = self.gathered.setdefault((code, slot), [])
        if (rank, index) not in members:
            members.append((rank, index))
        return len(members) == len(self.groups[slot].ranks)

    def _start_msp_group(
        self, rank: int, code: int, slot: int, ready: tuple[float, float, float]
    ) -> bool:
        """Run all shards at once; `rank` came last, and the others stand and wait."""
        produced, arrived, copied = ready
        members = self.gathered[code, slot]
        produced = max(produced, *(self.free[member] for member, _ in members))
        seconds = self.msp_seconds[code, slot]
        if self.layer_copies:
            start, width = max(produced, arrived, copied), len(members)
            waits = [
                self._wait_for_copies(member, code, slot, start, seconds, width)
                for member, _ in members
            ]
            copied = max(copied, *waits)
        finish = 0.0
        for member, place in members:
            finish = self._occupy(member, place, (produced, arrived, copied), seconds)
            if member != rank:
                self.position[member] += 1
                self.woken.append(member)
        self._finished(rank, code, slot, finish)
        return True

    def _copy(self, rank: int, index: int, code: int, slot: int) -> bool:
        """D2H or H2D: its own queue, beside the compute."""
        before = slot if code == D2H else D2H * self.size + slot
        if self.at[before] < 0:
            self.waiting[before] = rank
            return False
        queue, ready = self.engine_free[code], self.at[before]
        seconds = self.seconds[code][slot] / self.widths[rank][index]
        block_s = 0.0
        if code == H2D:
            ready = max(ready, self.free[rank])
            if self.layer_copies:  # a permission: its backward says when blocks come back
                self.reload[rank, slot] = index, ready
                self._publish(code * self.size + slot, max(ready, self.at[code * self.size + slot]))
                return True
        elif self.layer_copies:
            layers = self.layer_copies[slot // self.units].layers
            block_s = seconds / layers
            produced_s = self.msp_seconds.get((F, slot), self.seconds[F][slot])
            ready -= produced_s * (layers - 1) / layers
            self.block_out_s[rank] = block_s
        start = max(queue[rank], ready)
        finish = max(start + seconds, self.at[before] + block_s)
        queue[rank] = finish
        self.starts[rank][index], self.finishes[rank][index] = start, finish
        # The latest copy of a cut unit counts, because its shards run together.
        key = code * self.size + slot
        self._publish(key, max(finish, self.at[key]))
        return True

    def _copy_kv_out(self, rank: int, index: int, code: int, slot: int) -> bool:
        """D2H of K and V: behind the copies of the unit's saved tensors, in the same queue."""
        queue, made = self.engine_free[D2H], self.at[slot]
        seconds, block_s, ready = self.seconds[code][slot], 0.0, made
        if self.layer_copies:
            layers = self.layer_copies[slot // self.units].layers
            block_s = seconds / layers
            ready -= self.seconds[F][slot] * (layers - 1) / layers
            own = self.present[D2H][slot]
            self.block_out_s[rank] = block_s + (self.block_out_s[rank] if own else 0.0)
        start = max(queue[rank], ready)
        queue[rank] = finish = max(start + seconds, made + block_s)
        self.starts[rank][index], self.finishes[rank][index] = start, finish
        self.at[code * self.size + slot] = finish
        return True

    def _permit_kv_back(self, rank: int, index: int, code: int, slot: int) -> bool:
        """H2D of K and V: from now on, beside the backward that follows."""
        permitted = max(self.free[rank], self.at[D2H_KV * self.size + slot])
        self.kv_back[rank].append((index, slot, permitted))
        return True

    def _bring_kv_back(self, rank: int, slot: int, start: float, seconds: float) -> float:
        """Play the copies back of K and V that stand in front of a backward.

        They follow those of its own blocks, and are there when it ends; those that it reads, of
        its own stage and sequence, when it starts.

        Args:
            rank: that runs the backward.
            slot: of the backward.
            start: when everything else is there.
            seconds: of compute.

        Returns:
            When the backward can start and then never wait for them.
        """
        queue, sequence_of = self.engine_free[H2D], self.sequence_of
        reader = slot // self.units, sequence_of[slot % self.units]
        for index, copied, permitted in self.kv_back[rank]:
            begin = max(queue[rank], permitted)
            queue[rank] = finish = begin + self.seconds[H2D_KV][copied]
            self.starts[rank][index], self.finishes[rank][index] = begin, finish
            is_read = (copied // self.units, sequence_of[copied % self.units]) == reader
            start = max(start, finish if is_read else finish - seconds)
        self.kv_back[rank].clear()
        return start

    def _wait_for_copies(
        self, rank: int, code: int, slot: int, start: float, seconds: float, width: int
    ) -> float:
        """When an F or B can start at the earliest and then run without a wait for blocks.

        Within a unit every layer takes as long as any other. Of a forward, the end of a layer waits
        for the block that was made `out` layers before to have left; of a backward, each layer for
        its own block, and a block for the layer `back` before its own to begin. A wait in the
        middle counts as one in front.

        Args:
            rank: That runs it.
            code: Of the action.
            slot: Of the action.
            start: When everything else is there.
            seconds: Of compute.
            width: Shards that the unit is cut into.
        """
        flow = self.layer_copies[slot // self.units]
        layer_s = seconds / flow.layers
        out_s = sum(self.seconds[c][slot] for c in (D2H, D2H_KV) if self.present[c][slot])
        if code == F and out_s:
            return flow.forward_start_s(
                start,
                seconds=seconds,
                copy_s=out_s / width,
                free_s=self.engine_free[D2H][rank],
                block_before_s=self.block_out_s[rank],
            )
        if code != B:
            return 0.0
        begin = start
        if self.present[H2D][slot]:
            index, allowed = self.reload.pop((rank, slot))
            copy_s = self.seconds[H2D][slot] / width
            first = max(allowed, self.engine_free[H2D][rank])
            before = self.last_backward.get(rank)
            if before is not None:
                first = max(first, before[0] - flow.back * before[1])
            begin, last = flow.backward_start_s(start, first=first, layer_s=layer_s, copy_s=copy_s)
            self.engine_free[H2D][rank] = first + copy_s
            self.starts[rank][index], self.finishes[rank][index] = first, last
        self.last_backward[rank] = begin + seconds, layer_s
        return begin

    def _send(self, rank: int, index: int, code: int, slot: int) -> bool:
        compute = F if code == SEND_ACT else B
        if self.at[compute * self.size + slot] < 0:
            self.waiting[compute * self.size + slot] = rank
            return False
        ready = self.free[rank]
        if (code, slot) in self.routes:
            shard = self.shards[rank][index]
            route = self.routes[code, slot][shard]
            start, arrival = self._deliver(route, code, slot, shard, ready)
        else:
            target = slot + (self.units if code == SEND_ACT else -self.units)
            receiver = self.rank_of[target // self.units]
            size_bytes = self.message_bytes[slot % self.units]
            start, arrival = self._transfer(rank, receiver, size_bytes, ready)
            self._publish(code * self.size + target, arrival)
        self.starts[rank][index], self.finishes[rank][index] = start, arrival
        return True

    def _receive(self, rank: int, index: int, code: int, slot: int) -> bool:
        self.starts[rank][index] = self.finishes[rank][index] = self.free[rank]
        return True

    def _reduce(self, rank: int, index: int, code: int, slot: int) -> bool:
        start = max(self.free[rank], self.reduce_free[rank])
        finish = start + self.seconds[REDUCE][slot]
        self.reduce_free[rank] = finish
        self.starts[rank][index], self.finishes[rank][index] = start, finish
        return True

    def _fetch_weights(self, rank: int, index: int, code: int, stage: int) -> bool:
        """H2D of a stage's weights, into the room of the one that was named last but one."""
        held, ready = self.weights_held[rank], self.free[rank]
        if stage in held:
            self.starts[rank][index] = self.finishes[rank][index] = ready
        else:
            self._copy_in(rank, index, code, stage, ready)
        self.weights_held[rank] = [*held, stage][-STAGES_HELD:]
        return True

    def _bring_gradients_back(self, rank: int, index: int, code: int, stage: int) -> bool:
        ready = max(self.free[rank], self.gradients_gone[stage])
        self._copy_in(rank, index, code, stage, ready)
        return True

    def _copy_in(self, rank: int, index: int, code: int, stage: int, ready: float) -> None:
        """Copy what a whole stage waits for."""
        queue = self.engine_free[H2D]
        start = max(queue[rank], ready)
        queue[rank] = finish = start + self.seconds[code][stage]
        self.stage_here[stage] = max(self.stage_here[stage], finish)
        self.starts[rank][index], self.finishes[rank][index] = start, finish

    def _copy_gradients_out(self, rank: int, index: int, code: int, stage: int) -> bool:
        """D2H of a stage's gradients, behind its REDUCE where that stands in front."""
        queue = self.engine_free[D2H]
        start = max(queue[rank], self.free[rank], self.reduce_free[rank])
        queue[rank] = finish = start + self.seconds[code][stage]
        self.gradients_gone[stage] = finish
        self.starts[rank][index], self.finishes[rank][index] = start, finish
        return True

    def _deadlock(self) -> str:
        """The ranks that stand, each with its action and what it waits for."""
        waits = {rank: key for key, rank in self.waiting.items()}
        lines = []
        for rank in range(self.num_ranks):
            index = self.position[rank]
            if index == len(self.codes[rank]):
                continue
            action = self.schedule.programs[rank][index]
            lines.append(f"rank {rank} at action {index + 1}, {action}, {self._wants(waits, rank)}")
        shown = "; ".join(lines[:4])
        more = f"; and {len(lines) - 4} more ranks" if len(lines) > 4 else ""
        return f"the order of the programs contradicts itself: {shown}{more}"

    def _wants(self, waits: Mapping[int, int], rank: int) -> str:
        if rank not in waits:
            return "waits for the other shards of its unit"
        code, slot = divmod(waits[rank], self.size)
        stage, unit = divmod(slot, self.units)
        sequence = max(m for m, o in enumerate(self.schedule.unit_offsets()) if o <= unit)
        name = f"{sequence}.{unit - self.schedule.unit_offsets()[sequence]}"
        if code == SEND_ACT:
            return f"waits for the activation of {stage - 1}F{name}"
        if code == SEND_GRAD:
            return f"waits for the gradient of {stage + 1}B{name}"
        return f"waits for {stage}{('F', 'B', 'W', 'KV', 'D2H', 'H2D')[code]}{name}"


assert (SEND_ACT, SEND_GRAD, RECV_ACT, RECV_GRAD) == (6, 7, 8, 9), "results are indexed by opcode"
