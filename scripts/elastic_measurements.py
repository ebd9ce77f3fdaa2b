"""Measurements of one side of ``compare_elastic.py`` on one rank."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_engine import RankEngine  # beside this file
from planned_units import planned_seconds, simulated_timeline, unit_seconds  # beside this file

from sppo.planning.corpus.sides import SideStep, deviation
from sppo.schedule.actions import COMPUTE_KINDS
from sppo.schedule.simulation.measured_compute import (
    ActionSeconds,
    action_seconds,
    median_seconds,
    step_seconds,
)
from sppo.schedule.timeline import Timeline

_COUNTED = (
    "weights_bytes",
    "gradients_bytes",
    "kv_bytes",
    "kv_gradients_bytes",
    "activations_bytes",
    "loss_gradient_bytes",
)
"""Buckets that an engine counts: all tensors but the working set. There is no optimizer here."""


@dataclass(slots=True)
class SideMeasurements:
    """Measurements of one side on one rank.

    Attributes:
        steps: Steps of the side.
        seconds: Seconds of each step in each turn.
        idle_shares: Idle share of all ranks in each step and turn; on rank 0 only.
        losses: Mean loss of each step.
        resident_bytes: Peak bytes of the process above its bytes between steps, over all steps.
        saved_bytes: Peak bytes of saved activations, K/V and their gradients over all steps.
        timelines: Timeline of each step in the last turn; on rank 0 only.
        action_s: Measured seconds of the actions of each step in each turn; on rank 0 only.
    """

    steps: Sequence[SideStep]
    seconds: dict[int, list[float]] = field(default_factory=dict)
    idle_shares: list[float] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    resident_bytes: int = 0
    saved_bytes: int = 0
    timelines: dict[int, Timeline] = field(default_factory=dict)
    action_s: dict[int, list[ActionSeconds]] = field(default_factory=dict)

    def note(self, step: int, took_s: float, engine: RankEngine) -> None:
        """Record the step that was just run; every rank must call this method."""
        from sppo.training.executed_step import executed_timeline

        self.seconds.setdefault(step, []).append(took_s)
        self.saved_bytes = max(self.saved_bytes, engine.take_saved_bytes())
        done = engine.done
        assert done is not None, "a step was run"
        total = engine.ranks.peers.total([float(done.total_loss)])[0]
        self.losses[step] = total / done.num_valid
        timeline = executed_timeline(done, engine.ranks)
        if timeline is not None:
            self.idle_shares.append(timeline.bubble_fraction)
            self.timelines[step] = timeline
            self.action_s.setdefault(step, []).append(action_seconds(timeline))

    def _simulated_s(self, step: int, seconds: ActionSeconds) -> float:
        """Return the simulated seconds of a step with given seconds of its actions."""
        costs = self.steps[step].plan.evaluated.costs
        return step_seconds(self.timelines[step], costs=costs, seconds=seconds)

    def note_resident_bytes(self, peak_bytes: int) -> None:
        """Record the peak of a step that was run to measure memory."""
        self.resident_bytes = max(self.resident_bytes, peak_bytes)

    def _parts(self) -> dict[str, Any]:
        """Return what separates measured from simulated steps; on rank 0 only.

        `all_own_compute_s` is the time of each step in each turn, simulated with the compute times
        of that turn, and `median_compute_s` that of each step, with the median of each action over
        the turns. `predicted_compute_s` is that with predicted compute times; unlike the simulated
        `step_s` it has no update. `units` are the seconds of each forward and backward of a step,
        all stages together.
        """
        predicted = [planned_seconds(step.plan) for step in self.steps]
        return {
            "all_own_compute_s": [
                [self._simulated_s(step, seconds) for seconds in turns]
                for step, turns in self.action_s.items()
            ],
            "median_compute_s": [
                self._simulated_s(step, median_seconds(turns))
                for step, turns in self.action_s.items()
            ],
            "predicted_compute_s": [
                self._simulated_s(step, seconds) for step, seconds in enumerate(predicted)
            ],
            "units": [
                unit_seconds(step.plan, predicted[index], measured=self.action_s[index])
                for index, step in enumerate(self.steps)
            ],
        }

    def draw(self, path: Path) -> None:
        """Draw the simulated and the executed timeline of the last step."""
        from sppo.plots.timeline import write_png

        simulated = simulated_timeline(self.steps[-1].plan)
        write_png(path, timelines=[simulated, self.timelines[len(self.steps) - 1]])

    def figures(self, engine: RankEngine, *, lengths: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Return the figures of the side, complete on rank 0; every rank must call this method."""
        gather = engine.ranks.peers.all_gather
        resident = gather(self.resident_bytes + engine.state_bytes)
        peaks = gather(self.saved_bytes + engine.state_bytes)
        step_s = [statistics.median(self.seconds[step]) for step in range(len(self.steps))]
        plans = [step.plan for step in self.steps]
        found: dict[str, Any] = {
            "step_s": step_s,
            "all_step_s": list(self.seconds.values()),
            "tokens_per_s": sum(map(sum, lengths)) / sum(step_s),
            "losses": list(self.losses.values()),
            "resident_bytes": list(resident),
            "peak_bytes": list(peaks),
            "predicted_peak_bytes": _predicted_bytes(self.steps),
            "length_deviation": statistics.median(
                deviation(plan.evaluated.candidate.lengths) for plan in plans
            ),
        }
        if engine.ranks.is_main:
            found["idle_share"] = statistics.median(self.idle_shares)
            found["time_deviation"] = statistics.median(
                deviation(_unit_seconds(timeline)) for timeline in self.timelines.values()
            )
            found |= self._parts()
        return found


def _predicted_bytes(steps: Sequence[SideStep]) -> list[int]:
    """Return the predicted peak of each rank over all steps, of buckets that an engine counts."""
    of_steps = [
        [
            sum(getattr(rank.device, name) for name in _COUNTED)
            for rank in step.plan.evaluated.memory
        ]
        for step in steps
    ]
    return [max(of_rank) for of_rank in zip(*of_steps, strict=True)]


def _unit_seconds(timeline: Timeline) -> list[float]:
    """Return the compute seconds of each unit, summed over all ranks."""
    seconds: dict[tuple[int, int], float] = {}
    for track in timeline.ranks:
        for action, start, finish in zip(track.actions, track.start_s, track.finish_s, strict=True):
            if action.kind in COMPUTE_KINDS:
                seconds[action.unit] = seconds.get(action.unit, 0.0) + float(finish - start)
    return list(seconds.values())
