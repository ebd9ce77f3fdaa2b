"""Event loop of the simulator: start and end of each action of each rank.

Every resource serves its actions in program order: a rank's compute, its two copy engines, and
each directed link. So an action starts at the latest time of everything that it depends on, and no
event queue is needed: the loop walks a rank until an action depends on a result without a time
yet, and resumes the rank when that result gets its time.

Dependencies of an action, besides its resource:

* F: the F of the subsequence before (K/V), and the activation from the stage before;
* B: the F of the same unit, the B of the next subsequence (dK/dV), the gradient from the next
  stage, and the unit's H2D if the program has one; W: the B of its unit; KV: the F of its unit;
* D2H: the F of its unit; H2D: the D2H of its unit, and the preceding compute in the program, which
  frees the memory for it; :mod:`sppo.schedule.simulation.event_loop_copies`
  handles copies that flow layer by layer, and copies of K and V;
* REDUCE: the preceding compute; later compute waits for the REDUCE, because few buckets of
  gradients are in flight at once (:mod:`sppo.parallel.data_parallel`);
* copies of a whole stage's weights or gradients: the preceding compute and REDUCE; compute of the
  stage waits for copies to the device; gradients that leave before their REDUCE, and later compute,
  wait for the last reduction after a use;
* SEND: the preceding compute. In programs without SEND, a tensor is sent as soon as it exists. RECV
  takes no time: the message has arrived or it has not;
* a shard of an MSP group: the dependencies of its unit on all ranks of the MSP group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sppo.schedule.costs import Costs
from sppo.schedule.encoding import (
    H2D,
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
)
from sppo.schedule.msp_groups import Route
from sppo.schedule.schedule import Schedule
from sppo.schedule.simulation.event_loop_copies import SimulatedCopies
from sppo.schedule.simulation.event_loop_state import SimulationState

BUBBLE, COMMUNICATION, COPY = range(3)
IdleGap = tuple[float, float, int]


class DeadlockError(ValueError):
    """Error of a schedule whose ranks wait for each other: the order of the programs has a cycle.

    Attributes:
        rank: First rank that cannot proceed.
        index: Position in the program of that rank at which it waits, from 0.
    """

    def __init__(self, problem: str, *, rank: int, index: int) -> None:
        super().__init__(problem)
        self.rank = rank
        self.index = index


@dataclass(frozen=True, slots=True)
class Clock:
    """Times of all actions, by rank and position in its program, and each rank's idle gaps.

    A gap is (from, to, BUBBLE or COMMUNICATION or COPY) in seconds. After a rank's last compute
    action, only the wait for its REDUCE is recorded as a gap.
    """

    starts_s: Sequence[Sequence[float]]
    finishes_s: Sequence[Sequence[float]]
    gaps: Sequence[Sequence[IdleGap]]

    @property
    def end_s(self) -> float:
        """End of the last action."""
        return max(max(times, default=0.0) for times in self.finishes_s)


def run_clock(
    schedule: Schedule,
    *,
    programs: Sequence[EncodedProgram],
    costs: Costs,
    seconds: Mapping[tuple[int, int], float] | None = None,
) -> Clock:
    """Simulate `schedule` once.

    Args:
        schedule: Schedule to simulate.
        programs: Encoded programs of the ranks.
        costs: Costs of the actions.
        seconds: Seconds of actions by opcode and slot, which replace those of `costs`.

    Raises:
        DeadlockError: Actions wait for each other in a cycle; the message names the actions.
    """
    loop = _EventLoop(schedule, programs=programs, costs=costs)
    loop.set_seconds(seconds or {})
    loop.run()
    return Clock(loop.starts, loop.finishes, loop.gaps)


class _EventLoop(SimulationState):
    """Walk through the programs of all ranks of one simulation."""

    def __init__(
        self, schedule: Schedule, *, programs: Sequence[EncodedProgram], costs: Costs
    ) -> None:
        super().__init__(schedule, programs=programs, costs=costs)
        self.links = costs.links
        self.copies = SimulatedCopies(self)
        self.routes = schedule.msp_routes
        self.latest: dict[tuple[int, int], float] = {}
        self.outstanding = {key: len(routes) for key, routes in self.routes.items()}
        self.link_free: dict[int, float] = {}
        self.position = [0] * self.num_ranks
        self.reduced: set[int] = set()
        self.gathered: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.gaps: list[list[IdleGap]] = [[] for _ in range(self.num_ranks)]

    def run(self) -> None:
        """Walk every rank to the end of its program."""
        handlers: list[Callable[[int, int, int, int], bool]] = [self._compute] * NUM_COMPUTE
        copies = self.copies
        handlers += [copies.copy, copies.copy, self._send, self._send]
        handlers += [self._receive, self._receive, copies.copy_kv_out, copies.permit_kv_back]
        handlers += [self._reduce]
        handlers += [copies.fetch_weights, self._gradients_out, copies.bring_gradients_back]
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
        seconds, copies = self.seconds[code][slot], self.copies
        ready = (ready[0], ready[1], max(ready[2], copies.stage_here[slot // self.units]))
        if self.layer_copies:
            start = max(self.free[rank], *ready)
            waited = copies.wait_for_blocks(rank, code, slot, start, seconds, 1)
            ready = (ready[0], ready[1], max(ready[2], waited))
        if code == B and copies.kv_back[rank]:
            waited = copies.bring_kv_back(rank, slot, max(self.free[rank], *ready), seconds)
            ready = (ready[0], ready[1], max(ready[2], waited))
        finish = self._occupy(rank, index, ready, seconds)
        self._finished(rank, code, slot, finish)
        return True

    def _ready(self, rank: int, code: int, slot: int) -> tuple[float, float, float] | None:
        """Return when inputs were computed, arrived and were copied back; None if not yet."""
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
        """Return the keys of the other compute results that an action reads."""
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
        """Run an action on a rank's compute queue, record the gap before it, and return its end."""
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
        """Publish a compute result, and deliver it unless the program has SENDs for that."""
        self.publish(code * self.size + slot, finish)
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
            self.publish(wire * self.size + target, finish)
        elif self.sends_at_once:
            size_bytes = self.message_bytes[slot % self.units]
            _, arrival = self._transfer(rank, receiver, size_bytes, finish)
            self.publish(wire * self.size + target, arrival)

    def _transfer(
        self, sender: int, receiver: int, size_bytes: float, ready: float
    ) -> tuple[float, float]:
        """Put a message on its link; return its start and its arrival."""
        link = self.links.link(sender, receiver=receiver)
        edge = sender * self.num_ranks + receiver
        start = max(ready, self.link_free.get(edge, 0.0))
        sent = start + size_bytes / link.bytes_per_s
        self.link_free[edge] = sent
        return start, sent + link.latency_s

    def _deliver(
        self, route: Route, wire: int, slot: int, shard: int, ready: float
    ) -> tuple[float, float]:
        """Transfer one message of an MSP group; return its start and its arrival."""
        if route.sender == route.receiver:
            self._delivered(wire, slot, ready)
            return ready, ready
        size_bytes = self.message_bytes[slot % self.units] * route.share
        start, arrival = self._transfer(route.sender, route.receiver, size_bytes, ready)
        self._delivered(wire, slot, arrival)
        return start, arrival

    def _delivered(self, wire: int, slot: int, arrival: float) -> None:
        """Count one message of an MSP group; the last message publishes the whole tensor."""
        key = (wire, slot)
        self.outstanding[key] -= 1
        self.latest[key] = max(arrival, self.latest.get(key, 0.0))
        if not self.outstanding[key]:
            step = self.units if wire == SEND_ACT else -self.units
            self.publish(wire * self.size + slot + step, self.latest[key])

    def _msp_group_is_complete(self, rank: int, index: int, code: int, slot: int) -> bool:
        """Record that `rank` reached its shard; return whether all ranks of its MSP group have."""
        members = self.gathered.setdefault((code, slot), [])
        if (rank, index) not in members:
            members.append((rank, index))
        return len(members) == len(self.groups[slot].ranks)

    def _start_msp_group(
        self, rank: int, code: int, slot: int, ready: tuple[float, float, float]
    ) -> bool:
        """Run all shards of a unit at once; `rank` came last, and the other ranks are waiting."""
        produced, arrived, copied = ready
        members = self.gathered[code, slot]
        produced = max(produced, *(self.free[member] for member, _ in members))
        seconds = self.msp_seconds[code, slot]
        if self.layer_copies:
            start, width = max(produced, arrived, copied), len(members)
            waits = [
                self.copies.wait_for_blocks(member, code, slot, start, seconds, width)
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
            self.publish(code * self.size + target, arrival)
        self.starts[rank][index], self.finishes[rank][index] = start, arrival
        return True

    def _receive(self, rank: int, index: int, code: int, slot: int) -> bool:
        self.starts[rank][index] = self.finishes[rank][index] = self.free[rank]
        return True

    def _reduce(self, rank: int, index: int, code: int, stage: int) -> bool:
        self.starts[rank][index] = self.free[rank]
        self.finishes[rank][index] = self._wait_for_ranks(rank, self.seconds[REDUCE][stage])
        self.reduced.add(stage)
        return True

    def _gradients_out(self, rank: int, index: int, code: int, stage: int) -> bool:
        if stage not in self.reduced:
            self._wait_for_ranks(rank, self.last_reduction_wait_s[stage])
        return self.copies.copy_gradients_out(rank, index, code, stage)

    def _wait_for_ranks(self, rank: int, seconds: float) -> float:
        """Make compute of a rank wait for a reduction over ranks; return when the wait ends."""
        start = self.free[rank]
        self.free[rank] = finish = start + seconds
        if finish > start:
            self.gaps[rank].append((start, finish, COMMUNICATION))
        return finish

    def _deadlock(self) -> str:
        """Return the error text: ranks that cannot proceed, with their actions and waits."""
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
        sequence = max(m for m, o in enumerate(self.schedule.unit_offsets) if o <= unit)
        name = f"{sequence}.{unit - self.schedule.unit_offsets[sequence]}"
        if code == SEND_ACT:
            return f"waits for the activation of {stage - 1}F{name}"
        if code == SEND_GRAD:
            return f"waits for the gradient of {stage + 1}B{name}"
        return f"waits for {stage}{('F', 'B', 'W', 'KV', 'D2H', 'H2D')[code]}{name}"


assert (SEND_ACT, SEND_GRAD, RECV_ACT, RECV_GRAD) == (6, 7, 8, 9), "results are indexed by opcode"
