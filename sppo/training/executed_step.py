"""Measured timeline of the last step of a run, for the ranks of one pipeline.

Every rank records the start and the end of its actions by its own clock. Ranks of one machine have
the same clock. The clocks of different machines are aligned at a barrier of all ranks, to about
the latency of the network.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sppo.engine.engine import StepResult
from sppo.plots.chrome_trace import write_trace
from sppo.plots.timeline import write_png
from sppo.schedule.actions import Action
from sppo.schedule.timeline import Timeline, measured_timeline
from sppo.training.job import Ranks
from sppo.training.run_directory import TIMELINE_PLOT, TIMELINE_TRACE

_log = logging.getLogger(__name__)

_MOST_DRAWN = 4000
"""Largest number of actions for which a PNG plot is drawn; the Chrome trace can be zoomed."""


@dataclass(frozen=True, slots=True)
class StepTimelines:
    """Timelines of one step of a pipeline.

    Attributes:
        planned: Simulated timeline.
        measured: Measured timeline; a wait for a copy is part of the action that waited.
        with_measured_compute_s: Simulated seconds of the step with its measured compute.
        exposed_copy_s: Seconds that each pipeline rank waited for copies.
    """

    planned: Timeline
    measured: Timeline
    with_measured_compute_s: float
    exposed_copy_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _RankStep:
    """Executed actions of one rank in a step, with their times; sent to rank 0."""

    host: str
    met_s: float
    """Clock of the rank after the barrier of all ranks, in seconds."""
    pipeline_rank: int
    actions: tuple[Action, ...]
    """Actions in the order of their execution."""
    times_s: tuple[tuple[float, float], ...]
    """(start, end) of each action on the clock of the rank."""


def executed_timeline(executed: StepResult | None, ranks: Ranks) -> Timeline | None:
    """Return the measured timeline of the first pipeline on rank 0, and None on other ranks.

    Collective: every rank must call it. Returns None on all ranks if no step was executed.
    """
    if not ranks.peers.any(executed is not None):
        return None
    assert executed is not None, "all ranks have done the same steps"
    ranks.peers.barrier()
    own = _RankStep(
        platform.node(),
        time.perf_counter(),
        ranks.mesh.at.pipeline,
        tuple(done.action for done in executed.trace),
        tuple((done.start_s, done.finish_s) for done in executed.trace),
    )
    steps = ranks.peers.all_gather(own)
    if not ranks.is_main:
        return None
    pipeline = [steps[rank] for rank in ranks.mesh.pipeline_ranks]
    others = [n for n, s in enumerate(steps) if s.actions != pipeline[s.pipeline_rank].actions]
    if others:
        _log.warning("ranks %s executed another program than the first pipeline", others)
    return _timeline(executed, pipeline)


def _timeline(executed: StepResult, steps: Sequence[_RankStep]) -> Timeline:
    """Return the timeline of one pipeline's ranks, first to last, on the first rank's clock."""
    first = steps[0]
    offsets = [0.0 if step.host == first.host else step.met_s - first.met_s for step in steps]
    begin = min(
        start - offset
        for step, offset in zip(steps, offsets, strict=True)
        for start, _ in step.times_s
    )
    times = [
        [(start - offset - begin, finish - offset - begin) for start, finish in step.times_s]
        for step, offset in zip(steps, offsets, strict=True)
    ]
    program = executed.schedule.with_programs([step.actions for step in steps])
    return measured_timeline(program, times_s=times)


def timeline_writers(step: StepTimelines) -> dict[str, Callable[[Path], None]]:
    """Return the functions that draw planned and measured timeline, by the name of their file."""
    both = (step.planned, step.measured)
    writers: dict[str, Callable[[Path], None]] = {
        TIMELINE_TRACE: partial(write_trace, timelines=both),
    }
    if sum(timeline.schedule.num_actions for timeline in both) <= _MOST_DRAWN:
        writers[TIMELINE_PLOT] = partial(write_png, timelines=both)
    return writers
