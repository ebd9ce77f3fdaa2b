"""``sppo estimate --trace``: trace of the rank with the most memory on a fake GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property

from sppo.config.run import RunConfig
from sppo.dry_run.traced_step import TRACED_STEPS, ActionCounts, TracedStep, trace_step
from sppo.planning.estimate import Estimate
from sppo.planning.make_plan import make_plan
from sppo.planning.plan import ExecutionPlan
from sppo.planning.plan_program import plan_program
from sppo.planning.run_plan import run_candidate
from sppo.planning.search.evaluation import evaluate_placement
from sppo.training.steps.measured import MeasuredBuckets


@dataclass(frozen=True)
class RunTracer:
    """Tracer of the first rank at the pipeline position with the most memory.

    Attributes:
        found: Estimate of the run, with its plan.
        layers: Layers per stage to trace: stages of this number and of twice this number are
            traced, and the full number is extrapolated; None traces all layers.

    Raises:
        ValueError: The run is not for a GPU, or `layers` does not allow extrapolation.
    """

    found: Estimate
    layers: int | None = None

    def __post_init__(self) -> None:
        hardware = self.found.hardware
        if hardware.device.kind != "cuda":
            raise ValueError(
                f"a trace is of a GPU's memory, and {hardware.name} is a CPU: name a machine with "
                "GPUs, e.g. hardware.preset=h100"
            )
        every = self.found.whole.activations.input_every
        if self.layers is not None and every > 1:
            raise ValueError(
                f"--layers {self.layers} with activations.input_every={every}: what layers that "
                "share an input take does not grow evenly with their number; leave --layers out"
            )
        fewest = min(stage.num_layers for stage in self.plan.stages)
        if self.layers is not None and not 1 <= self.layers <= fewest // 2:
            raise ValueError(
                f"--layers {self.layers}: so many and twice as many layers of each stage are "
                f"traced, and the smallest stage has {fewest}: "
                + (f"write 1 to {fewest // 2}, or " if fewest > 1 else "")
                + "leave it out"
            )

    @cached_property
    def plan(self) -> ExecutionPlan:
        """Execution plan of the run."""
        return make_plan(self.found.whole, self.found.evaluated)

    @cached_property
    def position(self) -> int:
        """Position in the pipeline of the traced rank."""
        memory = [stage.memory.device.total_bytes for stage in self.plan.stages]
        return memory.index(max(memory)) % self.plan.pipeline_parallel_degree

    @cached_property
    def num_actions(self) -> int:
        """Number of actions that the trace runs, all steps together."""
        traces = 1 if self.layers is None else 2
        return traces * TRACED_STEPS * len(plan_program(self.plan).programs[self.position])

    def trace(self, on_action: Callable[[], None] = lambda: None) -> TracedStep:
        """Trace the rank, and extrapolate to all layers if `layers` is set.

        Args:
            on_action: Callback before every traced action.
        """
        rank = self.position * self.plan.sequence_parallel_degree
        if self.layers is None:
            return trace_step(self.found.whole, self.plan, rank=rank, on_action=on_action)
        few, more = (
            trace_step(*self._with_layers(count), rank=rank, on_action=on_action)
            for count in (self.layers, 2 * self.layers)
        )
        stages = self.plan.stages[self.position :: self.plan.pipeline_parallel_degree]
        whole = _extrapolated(few, more, layers=sum(stage.num_layers for stage in stages))
        return replace(whole, predicted=stages[0].memory.device)

    def _with_layers(self, layers: int) -> tuple[RunConfig, ExecutionPlan]:
        """Return the run with `layers` layers per stage, and a plan with the same placement."""
        whole, plan = self.found.whole, self.plan
        changes: dict[str, dict[str, object]] = {
            "model": {"num_layers": layers * len(plan.stages)},
            "sequence": {"boundaries": plan.boundaries},
            "parallel": {"schedule": plan.schedule},
            "activations": {"policy": plan.policy},
        }
        run = whole.model_copy(
            update={
                section: getattr(whole, section).model_copy(update=values)
                for section, values in changes.items()
            }
        )
        candidate = replace(
            run_candidate(run, hardware=self.found.hardware),
            state=plan.state_tiers,
            kv=plan.stages[0].kv,
        )
        return run, make_plan(run, evaluate_placement(candidate, self.found.evaluated.placement))


def _extrapolated(few: TracedStep, more: TracedStep, *, layers: int) -> TracedStep:
    """Return the trace of `layers` layers, extrapolated linearly from two traces of fewer layers.

    The peak of each moment of a step is linear in the number of layers; the peak over all moments
    need not be, since another moment may be the fullest with more layers. Stores are fullest after
    the same action for any number of layers, since all layers have the same placement.
    """
    times = (layers - few.num_layers) / (more.num_layers - few.num_layers)

    def on_line(a: float, b: float) -> float:
        return a + times * (b - a)

    measured = {
        field.name: round(
            on_line(getattr(few.measured, field.name), getattr(more.measured, field.name))
        )
        for field in fields(MeasuredBuckets)
    }
    peaks = {
        moment: round(on_line(few.peaks[moment], peak))
        for moment, peak in more.peaks.items()
        if moment in few.peaks
    }
    peak_bytes = max(peaks.values())
    # The working set is the part of the peak beyond tensors that are counted one by one.
    measured["working_bytes"] += peak_bytes - round(on_line(few.peak_bytes, more.peak_bytes))
    actions = {
        kind: ActionCounts(
            counts.num_actions,
            on_line(few.actions[kind].operations, counts.operations),
            on_line(few.actions[kind].launches, counts.launches),
        )
        for kind, counts in more.actions.items()
    }
    return replace(
        more,
        measured=MeasuredBuckets(**measured),
        peak_bytes=peak_bytes,
        peaks=peaks,
        actions=actions,
        kernels={
            name: round(on_line(few.kernels.get(name, 0), count))
            for name, count in more.kernels.items()
        },
        host_waits={
            where: round(on_line(few.host_waits.get(where, 0), count))
            for where, count in more.host_waits.items()
        },
        num_layers=layers,
        traced_layers=(few.num_layers, more.num_layers),
        traced_fullest=(few.fullest, more.fullest),
        seconds=few.seconds + more.seconds,
    )
