"""Simulation of a measured step with the compute times that were measured.

A step takes another time than planned because its compute takes another time, or because ranks wait
another time between compute actions: for messages, or for copies that are actions of their own. The
simulation of the same program with measured compute times separates the two. It differs from the
measured step by the time between compute actions alone. What a rank waits for inside an action,
such as copies of saved tensors, counts as compute, because a run measures it so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sppo.schedule.costs import CopyEngines, Costs
from sppo.schedule.encoding import NUM_COMPUTE, REDUCE, EncodedProgram
from sppo.schedule.simulation.event_loop import run_clock
from sppo.schedule.timeline import Timeline


def step_seconds(timeline: Timeline, *, costs: Costs) -> float:
    """Return the simulated seconds of a timeline's program with the timeline's compute times.

    Args:
        timeline: Timeline of the program, planned or measured.
        costs: Planned costs of the step, of which those of messages are used. Copies cost nothing.
    """
    programs = timeline.schedule.encoded
    seconds = _action_seconds(timeline, programs)
    free = replace(costs, copies=CopyEngines(), state_copies=None, layer_copies=())
    return run_clock(timeline.schedule, programs=programs, costs=free, seconds=seconds).end_s


def _action_seconds(
    timeline: Timeline, programs: Sequence[EncodedProgram]
) -> dict[tuple[int, int], float]:
    """Return the seconds of every compute action and reduction, by opcode and slot.

    Of an action in shards, the seconds of the longest shard.
    """
    seconds: dict[tuple[int, int], float] = {}
    for track, program in zip(timeline.ranks, programs, strict=True):
        timed = (program.codes < NUM_COMPUTE) | (program.codes == REDUCE)
        took = (track.finish_s - track.start_s)[timed].tolist()
        codes, slots = program.codes[timed].tolist(), program.slots[timed].tolist()
        for code, slot, second in zip(codes, slots, took, strict=True):
            seconds[code, slot] = max(second, seconds.get((code, slot), 0.0))
    return seconds
