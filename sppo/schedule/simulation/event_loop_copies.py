"""Copies of a simulation: two copy engines per rank and tier, and the waits for copies.

Copies of saved tensors flow layer by layer if the costs say so, see
:meth:`SimulatedCopies.wait_for_blocks`; K and V come back during a backward, see
:meth:`SimulatedCopies.bring_kv_back`; weights and gradients are copied stage by stage.
"""

from __future__ import annotations

from sppo.schedule.actions import RESIDENT_STAGES
from sppo.schedule.encoding import D2H, D2H_KV, H2D, H2D_KV, B, F
from sppo.schedule.simulation.event_loop_state import SimulationState


class SimulatedCopies:
    """Copies of one simulation, each played when the walk of its rank reaches it.

    A method that plays an action returns whether the action has a time; if not, its rank waits.

    Args:
        simulation: State of the simulation.
    """

    def __init__(self, simulation: SimulationState) -> None:
        self._simulation = simulation
        ranks, stages = simulation.num_ranks, simulation.schedule.num_stages
        self.engine_free = {D2H: [0.0] * ranks, H2D: [0.0] * ranks}
        self.state_engine_free = self.engine_free
        if simulation.has_state_queues:
            self.state_engine_free = {D2H: [0.0] * ranks, H2D: [0.0] * ranks}
        self.block_out_s = [0.0] * ranks
        self.reload: dict[tuple[int, int], tuple[int, float]] = {}
        self.kv_back: list[list[tuple[int, int, float]]] = [[] for _ in range(ranks)]
        self.last_backward: dict[int, tuple[float, float]] = {}
        self.weights_held: list[list[int]] = [[] for _ in range(ranks)]
        self.stage_here = [0.0] * stages
        """Times at which the weights and gradients of each stage have arrived."""
        self.gradients_gone = [0.0] * stages

    def copy(self, rank: int, index: int, code: int, slot: int) -> bool:
        """Play a D2H or H2D of saved tensors, on its own queue, in parallel with compute."""
        simulation = self._simulation
        key = code * simulation.size + slot
        before = slot if code == D2H else D2H * simulation.size + slot
        if simulation.at[before] < 0:
            simulation.waiting[before] = rank
            return False
        queue, ready = self.engine_free[code], simulation.at[before]
        seconds = simulation.seconds[code][slot] / simulation.widths[rank][index]
        block_s = 0.0
        if code == H2D:
            ready = max(ready, simulation.free[rank])
            if (
                simulation.layer_copies
            ):  # permitted only; the backward decides when blocks come back
                self.reload[rank, slot] = index, ready
                simulation.publish(key, max(ready, simulation.at[key]))
                return True
        elif simulation.layer_copies:
            layers = simulation.layer_copies[slot // simulation.units].layers
            block_s = seconds / layers
            produced_s = simulation.msp_seconds.get((F, slot), simulation.seconds[F][slot])
            ready -= produced_s * (layers - 1) / layers
            self.block_out_s[rank] = block_s
        start = max(queue[rank], ready)
        finish = max(start + seconds, simulation.at[before] + block_s)
        queue[rank] = finish
        simulation.starts[rank][index], simulation.finishes[rank][index] = start, finish
        # For a cut unit the latest copy counts, because its shards run together.
        simulation.publish(key, max(finish, simulation.at[key]))
        return True

    def copy_kv_out(self, rank: int, index: int, code: int, slot: int) -> bool:
        """Play a D2H of K and V, queued after the copies of the unit's saved tensors."""
        simulation = self._simulation
        queue, made = self.engine_free[D2H], simulation.at[slot]
        seconds, block_s, ready = simulation.seconds[code][slot], 0.0, made
        if simulation.layer_copies:
            layers = simulation.layer_copies[slot // simulation.units].layers
            block_s = seconds / layers
            ready -= simulation.seconds[F][slot] * (layers - 1) / layers
            own = simulation.present[D2H][slot]
            self.block_out_s[rank] = block_s + (self.block_out_s[rank] if own else 0.0)
        start = max(queue[rank], ready)
        queue[rank] = finish = max(start + seconds, made + block_s)
        simulation.starts[rank][index], simulation.finishes[rank][index] = start, finish
        simulation.at[code * simulation.size + slot] = finish
        return True

    def permit_kv_back(self, rank: int, index: int, code: int, slot: int) -> bool:
        """Play an H2D of K and V: record that the copy may start, during the next backward."""
        simulation = self._simulation
        permitted = max(simulation.free[rank], simulation.at[D2H_KV * simulation.size + slot])
        self.kv_back[rank].append((index, slot, permitted))
        return True

    def bring_kv_back(self, rank: int, slot: int, start: float, seconds: float) -> float:
        """Play the H2D copies of K and V that precede a backward in the program.

        The copies follow the backward's own blocks in the queue. K and V that the backward
        reads, those of its own stage and sequence, must arrive before it starts; others before it
        ends.

        Args:
            rank: Rank that runs the backward.
            slot: Slot of the backward.
            start: Time at which all other inputs are ready.
            seconds: Compute time of the backward.

        Returns:
            Earliest start of a backward that never waits for these copies.
        """
        simulation = self._simulation
        queue, sequence_of = self.engine_free[H2D], simulation.sequence_of
        reader = slot // simulation.units, sequence_of[slot % simulation.units]
        for index, copied, permitted in self.kv_back[rank]:
            begin = max(queue[rank], permitted)
            queue[rank] = finish = begin + simulation.seconds[H2D_KV][copied]
            simulation.starts[rank][index], simulation.finishes[rank][index] = begin, finish
            is_read = (copied // simulation.units, sequence_of[copied % simulation.units]) == reader
            start = max(start, finish if is_read else finish - seconds)
        self.kv_back[rank].clear()
        return start

    def wait_for_blocks(
        self, rank: int, code: int, slot: int, start: float, seconds: float, width: int
    ) -> float:
        """Return the earliest time at which an F or B can start and never wait for blocks.

        All layers of a unit are assumed to take equal time. In a forward, the end of a layer waits
        until the block made `out` layers before has left; in a backward, each layer waits for its
        own block, and a block waits until the layer `back` before its own begins. A wait in the
        middle of the unit is counted as a wait at its start.

        Args:
            rank: Rank that runs the action.
            code: Opcode of the action.
            slot: Slot of the action.
            start: Time at which all other inputs are ready.
            seconds: Compute time of the action.
            width: Number of shards of the unit.
        """
        simulation = self._simulation
        flow = simulation.layer_copies[slot // simulation.units]
        layer_s = seconds / flow.layers
        out_s = sum(
            simulation.seconds[c][slot] for c in (D2H, D2H_KV) if simulation.present[c][slot]
        )
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
        if simulation.present[H2D][slot]:
            index, allowed = self.reload.pop((rank, slot))
            copy_s = simulation.seconds[H2D][slot] / width
            first = max(allowed, self.engine_free[H2D][rank])
            before = self.last_backward.get(rank)
            if before is not None:
                first = max(first, before[0] - flow.back * before[1])
            begin, last = flow.backward_start_s(start, first=first, layer_s=layer_s, copy_s=copy_s)
            self.engine_free[H2D][rank] = first + copy_s
            simulation.starts[rank][index], simulation.finishes[rank][index] = first, last
        self.last_backward[rank] = begin + seconds, layer_s
        return begin

    def fetch_weights(self, rank: int, index: int, code: int, stage: int) -> bool:
        """Play an H2D of a stage's weights into the memory of the stage named last but one."""
        simulation = self._simulation
        held, ready = self.weights_held[rank], simulation.free[rank]
        if stage in held:
            simulation.starts[rank][index] = simulation.finishes[rank][index] = ready
        else:
            self._copy_in(rank, index, code, stage, ready)
        self.weights_held[rank] = [*held, stage][-RESIDENT_STAGES:]
        return True

    def bring_gradients_back(self, rank: int, index: int, code: int, stage: int) -> bool:
        """Play an H2D of a stage's gradients, after their last D2H."""
        simulation = self._simulation
        ready = max(simulation.free[rank], self.gradients_gone[stage])
        self._copy_in(rank, index, code, stage, ready)
        return True

    def _copy_in(self, rank: int, index: int, code: int, stage: int, ready: float) -> None:
        """Play a copy to the device that compute of the whole stage waits for."""
        simulation = self._simulation
        queue = self.state_engine_free[H2D]
        start = max(queue[rank], ready)
        queue[rank] = finish = start + simulation.seconds[code][stage]
        self.stage_here[stage] = max(self.stage_here[stage], finish)
        simulation.starts[rank][index], simulation.finishes[rank][index] = start, finish

    def copy_gradients_out(self, rank: int, index: int, code: int, stage: int) -> bool:
        """Play a D2H of a stage's gradients, after the preceding compute and REDUCE."""
        simulation = self._simulation
        queue = self.state_engine_free[D2H]
        start = max(queue[rank], simulation.free[rank])
        queue[rank] = finish = start + simulation.seconds[code][stage]
        self.gradients_gone[stage] = finish
        simulation.starts[rank][index], simulation.finishes[rank][index] = start, finish
        return True
