"""Simulation of a measured step with the compute times that were measured.

A step takes another time than planned for two reasons: units take longer or shorter than predicted,
and ranks wait longer or shorter between units. The simulation of the same program with measured
compute times lies between the two: its step time differs from the planned one by the units alone,
and from the measured one by the time between units alone (messages that arrive late, or a rank that
does not go on at once).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sppo.schedule.costs import CopyEngines, Costs
from sppo.schedule.encoding import NUM_COMPUTE, encode
from sppo.schedule.simulation.event_loop import run_clock
from sppo.schedule.timeline import Timeline

ComputeSeconds = Mapping[tuple[int, int], float]
"""Seconds of compute actions, by opcode and slot (see `sppo.schedule.encoding`)."""


def compute_seconds(timeline: Timeline) -> dict[tuple[int, int], float]:
    """Return the seconds of every compute action of a timeline; of shards, the longest."""
    seconds: dict[tuple[int, int], float] = {}
    for track, program in zip(timeline.ranks, encode(timeline.schedule), strict=True):
        compute = program.codes < NUM_COMPUTE
        took = (track.finish_s - track.start_s)[compute].tolist()
        codes, slots = program.codes[compute].tolist(), program.slots[compute].tolist()
        for code, slot, second in zip(codes, slots, took, strict=True):
            seconds[code, slot] = max(second, seconds.get((code, slot), 0.0))
    return seconds


def median_seconds(steps: Sequence[ComputeSeconds]) -> dict[tuple[int, int], float]:
    """Return the median of every compute action over several steps with the same program."""
    return {key: statistics.median(step[key] for step in steps) for key in steps[0]}


def step_seconds(timeline: Timeline, *, costs: Costs, compute: ComputeSeconds) -> float:
    """Return the simulated seconds of a timeline's program with given seconds of its compute.

    Args:
        timeline: Timeline of the program, planned or measured.
        costs: Costs of messages and reductions. Copies cost nothing: if they make compute wait, a
            measured run counts this as compute.
        compute: Seconds of every compute action.
    """
    free = replace(costs, copies=CopyEngines(), state_copies=None, layer_copies=())
    programs = encode(timeline.schedule)
    return run_clock(timeline.schedule, programs=programs, costs=free, compute=compute).end_s
