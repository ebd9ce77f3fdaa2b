"""What each action of a step waits for, and how long it occupies which resource.

Every resource serves in program order: a rank's compute, its two copy engines (two more for weights
and gradients, if these are in another tier), and each directed link. Besides its resource an action
waits for:

* F: the F of the subsequence before (K/V), and the activation from the stage before; on a stage
  without a backward in a training step, the F of `UNITS_AHEAD` units before on the next rank's
  stage, so that few inputs wait there;
* B: the F of the same unit, the B of the next subsequence (dK/dV), the gradient from the next
  stage, and the unit's H2D if the program has one; W: the B of its unit; KV: the F of its unit;
* D2H: the F of its unit; H2D: the D2H of its unit, and the preceding compute in the program, which
  frees the memory for it. If copies flow layer by layer, a D2H starts with the first layer of its
  F, and an H2D runs while the backward before its own runs;
* H2D of K and V: the D2H, and the preceding compute. The copy goes behind the copies of the next
  backward, which waits for K and V that it reads before it starts, and for others before it ends;
* REDUCE: the preceding compute; later compute waits for the REDUCE, because few buckets of
  gradients are in flight at once (:mod:`sppo.parallel.row_messages`);
* copies of a whole stage's weights or gradients: the preceding compute and REDUCE; compute of the
  stage waits for copies to the device; gradients that leave before their REDUCE, and later compute,
  wait for the last reduction after a use;
* SEND: the preceding compute. In programs without SEND, a tensor is sent as soon as it exists. RECV
  takes no time: the message has arrived or it has not;
* a shard of an MSP group: the dependencies of its unit on all ranks of the MSP group.
"""

from __future__ import annotations

import numpy as np

from sppo.schedule.actions import RESIDENT_STAGES, UNITS_AHEAD, Op
from sppo.schedule.costs import Costs
from sppo.schedule.graph import Edges, Floats, Ints, in_turn
from sppo.schedule.msp_costs import msp_seconds
from sppo.schedule.schedule import Schedule
from sppo.schedule.timeline import BUBBLE, COMMUNICATION, COPY

_TURNS = 8
"""Turns from one action of a rank to the next, between which other services may run."""


class Dependencies:
    """Services of a step, their seconds, and what each of them waits for.

    The first services are the actions. Further ones are the common start of an MSP group,
    the messages of a program without SENDs, and waits for a reduction before gradients leave.

    Args:
        schedule: Schedule of the step.
        costs: Costs of the actions.
        seconds: Seconds of each action, rank after rank, which replace those of `costs`; NaN
            replaces nothing. An MSP group takes those of its longest shard.

    Attributes:
        schedule: Schedule of the step.
        seconds: Seconds of each service.
        ranks: Rank in whose program each service is walked.
        turns: Order of the services of a rank.
        inputs: Service that waits for the inputs of each action: that of the action, or the
            common start of its MSP group.
        compute: What occupies compute of the ranks, or makes it wait, in program order: actions,
            services that the next turn waits for, and services that wait for the turn before.
        latency_s: Seconds from the end of each SEND to the arrival of its message.
        implied: Waits that follow from other edges: they tell causes, and change no time.
        last_blocks: Backwards and the H2Ds of their units that end with them at the earliest.
    """

    def __init__(self, schedule: Schedule, *, costs: Costs, seconds: Floats | None = None) -> None:
        assert (costs.num_stages, costs.num_units) == (schedule.num_stages, schedule.num_units), (
            f"costs of {costs.num_stages} stages, {costs.num_units} units for a schedule of "
            f"{schedule.num_stages}, {schedule.num_units}"
        )
        self.schedule, self._costs = schedule, costs
        self.ranks = schedule.ranks
        self.turns = _TURNS * np.arange(schedule.never + 1)
        self.seconds = np.zeros(schedule.never + 1)
        self.inputs = np.arange(schedule.never + 1)
        self.latency_s = np.zeros(schedule.never + 1)
        self._edges: list[Edges] = []
        self.implied: list[Edges] = []
        self.last_blocks = Edges.of(*np.zeros((2, 0), dtype=np.int64))
        self._start_groups_at_once()
        self._set_seconds(seconds)
        self.compute = self._compute_in_turn()
        self._compute_reads()
        self._compute_receives()
        self._wait_for_room()
        fetched = self._stage_copies()
        self._copies_out()
        self._copies_back(fetched)
        if costs.layer_copies:
            self._room_for_blocks()

    @property
    def edges(self) -> Edges:
        """Edges of the step, which say what each service waits for."""
        return Edges.joined(self._edges)

    def action_of(self, services: Ints) -> Ints:
        """Return the action that each service belongs to."""
        beside = (self.turns[services] + 1) // _TURNS
        return np.where(services <= self.schedule.never, services, beside)

    def _wait(
        self, earlier: Ints, later: Ints, *, lag_s: Floats | float = 0.0, cause: int = BUBBLE
    ) -> None:
        """Let services wait for earlier services."""
        self._edges.append(Edges.of(earlier, later, lag_s=lag_s, cause=cause))

    def _new_services(self, seconds: Floats, beside: Ints, *, turn: int) -> Ints:
        """Return new services that are walked `turn` turns after the actions `beside`."""
        self.seconds = np.append(self.seconds, seconds)
        self.ranks = np.append(self.ranks, self.schedule.ranks[beside])
        self.turns = np.append(self.turns, self.turns[beside] + turn)
        return np.arange(self.seconds.size - seconds.size, self.seconds.size)

    def _start_groups_at_once(self) -> None:
        """Let the shards of each unit wait for one start."""
        cut, first = self.schedule.first_shards()
        leaders, group = np.unique(first, return_inverse=True)
        starts = self._new_services(np.zeros(leaders.size), leaders, turn=-1)
        self.inputs[cut] = starts[group]
        self._wait(starts[group], cut)

    def _set_seconds(self, given: Floats | None) -> None:
        """Set the seconds of all actions."""
        costs, schedule = self._costs, self.schedule
        copies, state = costs.copies, costs.state_copies or costs.copies
        split = schedule.at(Op.W, np.arange(schedule.size)) != schedule.never
        fused_s = np.where(split.reshape(costs.weight_s.shape), 0.0, costs.weight_s)
        tables = {
            Op.F: costs.forward_s,
            Op.B: costs.backward_s + fused_s,
            Op.W: costs.weight_s,
            Op.KV: costs.kv_recompute_s,
            Op.D2H: costs.offload_bytes / copies.d2h_bytes_per_s,
            Op.H2D: costs.offload_bytes / copies.h2d_bytes_per_s,
            Op.D2H_KV: costs.kv_offload_bytes / copies.d2h_bytes_per_s,
            Op.H2D_KV: costs.kv_offload_bytes / copies.h2d_bytes_per_s,
            Op.REDUCE: costs.reduce_s,
            Op.H2D_WEIGHTS: costs.streamed_weight_bytes / state.h2d_bytes_per_s,
            Op.D2H_GRADIENTS: costs.streamed_gradient_bytes / state.d2h_bytes_per_s,
            Op.H2D_GRADIENTS: costs.streamed_gradient_bytes / state.h2d_bytes_per_s,
        }
        for code, table in tables.items():
            found = schedule.of(code)
            self.seconds[found] = table.ravel()[schedule.slots[found]]
        shards = schedule.of(Op.D2H, Op.H2D)
        self.seconds[shards] /= schedule.widths[shards]
        if schedule.most_shards > 1:
            cut_s = msp_seconds(self.schedule, groups=self.schedule.msp_groups, costs=costs)
            cut = np.flatnonzero(self.inputs > schedule.never)
            keys = zip(schedule.codes[cut].tolist(), schedule.slots[cut].tolist(), strict=True)
            self.seconds[cut] = [cut_s[key] for key in keys]
        if given is not None:
            longest, known = np.full(self.seconds.shape, -np.inf), np.flatnonzero(~np.isnan(given))
            np.maximum.at(longest, self.inputs[known], given[known])
            self.seconds[known] = longest[self.inputs[known]]

    def _compute_in_turn(self) -> tuple[Ints, Ints, Ints]:
        """Let compute run in program order, with reductions, and return the turns."""
        schedule = self.schedule
        reductions, leaving = schedule.of(Op.REDUCE), schedule.of(Op.D2H_GRADIENTS)
        _, is_reduced = schedule.nearest(leaving, reductions, of=schedule.stages)
        early = leaving[~is_reduced]
        wait_s = self._costs.last_reduction_wait_s[schedule.stages[early]]
        reduced = self._new_services(wait_s, early, turn=-1)
        occupying = np.concatenate([schedule.compute, reductions, early])
        order = np.argsort(occupying, kind="stable")
        actions = occupying[order]
        services = np.concatenate([schedule.compute, reductions, reduced])[order]
        waiting = np.concatenate([self.inputs[schedule.compute], reductions, reduced])[order]
        follows = np.flatnonzero(np.diff(schedule.ranks[actions]) == 0)
        self._wait(services[follows], waiting[follows + 1])
        return actions, services, waiting

    def _after_compute(self, waiting: Ints) -> None:
        """Let actions wait for the preceding compute and reduction on their rank."""
        ranks, (actions, services, _) = self.schedule.ranks, self.compute
        place = np.searchsorted(actions, waiting, side="right") - 1
        follows = (place >= 0) & (ranks[actions[place]] == ranks[waiting])
        self._wait(services[place[follows]], waiting[follows])

    def _compute_reads(self) -> None:
        """Let compute wait for results of its own stage."""
        schedule = self.schedule
        forward, backward = schedule.of(Op.F), schedule.of(Op.B)
        for later, code, step in (
            (forward[schedule.before[forward] > 0], Op.F, -1),
            (backward, Op.F, 0),
            (backward[schedule.behind[backward] > 0], Op.B, 1),
            (schedule.of(Op.W), Op.B, 0),
            (schedule.of(Op.KV), Op.F, 0),
        ):
            self._read(schedule.at(code, schedule.slots[later] + step), later)

    def _read(self, earlier: Ints, later: Ints) -> None:
        """Let actions wait for results of compute, unless the order of their rank implies it."""
        schedule = self.schedule
        implied = (schedule.ranks[earlier] == schedule.ranks[later]) & (earlier < later)
        implied &= (schedule.widths[earlier] == 1) & (schedule.widths[later] == 1)
        self._wait(earlier[~implied], self.inputs[later[~implied]])

    def _compute_receives(self) -> None:
        """Let compute wait for results of neighbouring stages, and for the messages with them."""
        schedule = self.schedule
        self._after_compute(schedule.of(Op.SEND_ACT, Op.SEND_GRAD, Op.RECV_ACT, Op.RECV_GRAD))
        units, links = schedule.num_units, []
        for send, code, step in ((Op.SEND_ACT, Op.F, units), (Op.SEND_GRAD, Op.B, -units)):
            readers = schedule.of(code)
            readers = readers[schedule.shards[readers] == 0]
            sources = schedule.slots[readers] - step
            has_source = (sources >= 0) & (sources < schedule.size)
            readers, producers = readers[has_source], schedule.at(code, sources[has_source])
            (_, _, slots, _, counts), *_ = schedule.messages[send]
            crosses = np.isin(sources[has_source], slots[counts == 1])
            crosses &= producers != schedule.never
            self._read(producers[~crosses], readers[~crosses])
            links.append(self._transfer(send, code, step))
        sent, pairs, turns = map(np.concatenate, zip(*links, strict=True))
        self._wait(*in_turn(sent, resources=pairs, turns=turns))

    def _wait_for_room(self) -> None:
        """Let forwards of stages without a backward wait for the next rank's stage."""
        schedule = self.schedule
        forward = schedule.of(Op.F) if schedule.is_training else schedule.of()
        stages, units = schedule.stages[forward], schedule.units[forward]
        waits = (stages < schedule.forward_only_stages) & (units >= UNITS_AHEAD)
        forward = forward[waits & ((stages + 1) % schedule.num_ranks > 0)]
        ahead = schedule.slots[forward] + schedule.num_units - UNITS_AHEAD
        self._wait(schedule.at(Op.F, ahead), self.inputs[forward])

    def _transfer(self, send: int, code: int, step: int) -> tuple[Ints, Ints, Ints]:
        """Let messages wait for results, and readers for messages.

        Args:
            send: Opcode of the wire's SEND.
            code: F or B, which makes the tensors and reads them.
            step: Difference of the slots of reader and maker.

        Returns:
            Service, link and turn of each message.
        """
        schedule = self.schedule
        sends, receives, shards, shares = schedule.messages[send]
        senders, _, slots, numbers, _ = sends
        producers = schedule.at(code, slots, shards)
        readers = self.inputs[schedule.at(code, slots + step)]
        self.implied.append(Edges.of(producers, readers))
        pairs = senders * schedule.num_ranks + receives[0]
        used, own = np.unique(pairs, return_inverse=True)
        links = [
            self._costs.links.link(pair // schedule.num_ranks, receiver=pair % schedule.num_ranks)
            for pair in used.tolist()
        ]
        rates = np.array([link.bytes_per_s for link in links])[own]
        latencies = np.array([link.latency_s for link in links])[own]
        sizes = self._costs.message_bytes[schedule.units[producers]] * shares
        if schedule.of(Op.SEND_ACT, Op.SEND_GRAD).size:
            sent = schedule.at(send, slots, numbers)
            self.seconds[sent], self.latency_s[sent] = sizes / rates, latencies
            self._read(producers, sent)
        else:
            sent = self._new_services(sizes / rates, producers, turn=1)
            self._wait(producers, sent)
        self._wait(sent, readers, lag_s=latencies, cause=COMMUNICATION)
        return sent, pairs, self.turns[sent]

    def _stage_copies(self) -> Ints:
        """Let copies of weights and gradients wait for compute, and compute for those back.

        Returns:
            Copies to the device, without those of weights that are there.
        """
        schedule = self.schedule
        weights, gradients = schedule.of(Op.H2D_WEIGHTS), schedule.of(Op.H2D_GRADIENTS)
        leaving = schedule.of(Op.D2H_GRADIENTS)
        stages, ranks = schedule.stages[weights], schedule.ranks[weights]
        held = np.zeros(weights.shape, dtype=bool)
        for ago in range(1, RESIDENT_STAGES + 1):
            held[ago:] |= (stages[ago:] == stages[:-ago]) & (ranks[ago:] == ranks[:-ago])
        self.seconds[weights[held]] = 0.0
        self._after_compute(np.concatenate([weights, gradients, leaving]))
        gone, has_gone = schedule.nearest(gradients, leaving, of=schedule.stages)
        self._wait(gone[has_gone], gradients[has_gone])
        fetched = np.concatenate([weights[~held], gradients])
        used, is_used = schedule.nearest(fetched, schedule.compute, of=schedule.stages, behind=True)
        self._wait(fetched[is_used], self.inputs[used[is_used]], cause=COPY)
        return fetched

    def _copies_out(self) -> None:
        """Let copies off the device wait for what they copy, and run one after the other."""
        schedule, seconds = self.schedule, self.seconds
        out = schedule.of(Op.D2H, Op.D2H_KV)
        made = schedule.at(Op.F, schedule.slots[out])
        if self._costs.layer_copies:
            layers = self._flow("layers", out)
            begin_s = -seconds[made] * (layers - 1) / layers
            self.implied.append(Edges.of(made, out, lag_s=begin_s))
            lag_s = np.maximum(begin_s, seconds[out] / layers - seconds[out])
            self._wait(made, out, lag_s=lag_s, cause=COPY)
        else:
            self._wait(made, out)
        self._on_engines(out, schedule.of(Op.D2H_GRADIENTS))

    def _copies_back(self, fetched: Ints) -> None:
        """Let copies to the device wait for memory, compute for the copies, and copies in turn."""
        schedule, slots, ranks = self.schedule, self.schedule.slots, self.schedule.ranks
        saved, kv = schedule.of(Op.H2D), schedule.of(Op.H2D_KV)
        self._after_compute(np.concatenate([saved, kv]))
        self._wait(schedule.at(Op.D2H, slots[saved], schedule.shards[saved]), saved)
        self._wait(schedule.at(Op.D2H_KV, slots[kv]), kv)
        readers = schedule.at(Op.B, slots[saved], schedule.shards[saved])
        if self._costs.layer_copies:
            self._blocks_back(saved, readers)
            self.turns[saved] = self.turns[readers] - 3
        else:
            self._wait(saved, self.inputs[readers], cause=COPY)
        beside, is_beside = schedule.nearest(kv, schedule.of(Op.B), of=ranks, behind=True)
        kv, beside = kv[is_beside], beside[is_beside]
        self.turns[kv] = self.turns[beside] - 2
        is_read = schedule.stages[kv] == schedule.stages[beside]
        is_read &= schedule.sequences[kv] == schedule.sequences[beside]
        lag_s = np.where(is_read, 0.0, -self.seconds[beside])
        self._wait(kv, self.inputs[beside], lag_s=lag_s, cause=COPY)
        self._on_engines(np.concatenate([saved, kv]), fetched)

    def _on_engines(self, copies: Ints, stage_copies: Ints) -> None:
        """Let copies of each rank in one direction run one after the other."""
        ranks, both = self.schedule.ranks, np.concatenate([copies, stage_copies])
        engines = ranks[both]
        if self._costs.state_copies is not None:
            engines[copies.size :] += self.schedule.num_ranks
        self._wait(*in_turn(both, resources=engines, turns=self.turns[both]))

    def _flow(self, name: str, actions: Ints) -> Ints:
        """Return a field of :class:`sppo.schedule.costs.LayerCopies` for each action's stage."""
        numbers = np.array([getattr(flow, name) for flow in self._costs.layer_copies])
        found: Ints = numbers[self.schedule.stages[actions]]
        return found

    def _blocks_back(self, saved: Ints, readers: Ints) -> None:
        """Let the blocks of a backward come back while the backward before it runs.

        The first block waits until the layer `back` before the backward begins; each layer waits
        for its own block. A wait in the middle of the backward is counted as a wait at its start.
        """
        schedule, seconds = self.schedule, self.seconds
        layers = self._flow("layers", saved)
        block_s, behind_s = seconds[saved] / layers, (layers - 1) * seconds[readers] / layers
        lag_s = np.maximum(block_s - seconds[saved], -behind_s)
        self._wait(saved, self.inputs[readers], lag_s=lag_s, cause=COPY)
        ahead_s = np.minimum(behind_s, self._flow("back", saved) * seconds[readers] / layers)
        lag_s = behind_s - ahead_s + block_s - seconds[readers]
        self.last_blocks = Edges.of(readers, saved, lag_s=lag_s)
        before, is_before = schedule.nearest(readers, schedule.of(Op.B), of=schedule.ranks)
        saved, before = saved[is_before], before[is_before]
        layer_before_s = seconds[before] / self._flow("layers", before)
        self._wait(before, saved, lag_s=-self._flow("back", saved) * layer_before_s)

    def _room_for_blocks(self) -> None:
        """Let forwards wait until blocks have left.

        The end of a layer waits until the block made `out` layers before has left. All layers of a
        unit are taken as equal, and a wait in the middle is counted as a wait at the start.
        """
        schedule, seconds = self.schedule, self.seconds
        forward, slots = schedule.of(Op.F), schedule.slots
        own = schedule.at(Op.D2H, slots[forward], schedule.shards[forward])
        copy_s = seconds[own] + seconds[schedule.at(Op.D2H_KV, slots[forward])]
        forward, copy_s = forward[copy_s > 0], copy_s[copy_s > 0]
        layers, out = self._flow("layers", forward), self._flow("out", forward)
        all_s, beyond = seconds[forward], layers - out
        layer_s, block_s = all_s / layers, copy_s / layers
        # Blocks of the forward itself: it starts later than all else allows.
        later_s = np.zeros(seconds.size)
        more_s = np.maximum(block_s - out * layer_s, beyond * block_s - (layers - 1) * layer_s)
        later_s[self.inputs[forward]] = np.where(beyond > 0, more_s, 0.0)
        waiting = np.flatnonzero(later_s > 0)
        # Ahead of the first action, and of its start if a group of ranks runs it.
        origin = self._new_services(np.zeros(1), np.zeros(1, dtype=np.int64), turn=-2)
        self._wait(np.repeat(origin, waiting.size), waiting)
        edges = self.edges
        is_later = later_s[edges.later] > 0
        self._edges, moved = [edges.where(~is_later)], edges.where(is_later)
        self.implied.append(moved)
        self._wait(moved.earlier, moved.later, lag_s=moved.lag_s + later_s[moved.later], cause=COPY)
        # Blocks of earlier forwards.
        copies, kv = schedule.of(Op.D2H, Op.D2H_KV), schedule.of(Op.D2H_KV)
        blocks_s = np.zeros(seconds.size)
        blocks_s[copies] = seconds[copies] / self._flow("layers", copies)
        blocks_s[kv] += blocks_s[schedule.at(Op.D2H, slots[kv])]
        before, _ = schedule.nearest(forward, copies, of=schedule.ranks)
        if self._costs.state_copies is None:
            copies = schedule.of(Op.D2H, Op.D2H_KV, Op.D2H_GRADIENTS)
        last, is_last = schedule.nearest(forward, copies, of=schedule.ranks)
        own_s = [beyond * layer_s, block_s + (beyond - 1) * layer_s, beyond * block_s]
        lag_s = np.where(beyond > 0, np.maximum.reduce(own_s), beyond * blocks_s[before])
        lag_s = np.maximum((layers - 1) * layer_s - (out - 1) * blocks_s[before], lag_s) - all_s
        waiting = self.inputs[forward[is_last]]
        self._wait(last[is_last], waiting, lag_s=lag_s[is_last], cause=COPY)
