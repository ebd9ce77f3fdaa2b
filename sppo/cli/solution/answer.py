"""Answer of ``sppo solve``: what the answers for the stream and for samples have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.table import Table

from sppo.cli.printing import Screen, Unbroken, columns, table
from sppo.cli.solution.candidate import (
    hardware_json,
    shortfall_json,
    validation_json,
    validation_line,
)
from sppo.cli.solution.explanation import explanation_json, explanation_screen
from sppo.hardware.run_hardware import hardware_line
from sppo.planning.changes import Change
from sppo.planning.corpus.search import CorpusSolution, PlannedDegrees
from sppo.planning.effective_time import EffectiveTime
from sppo.planning.search.choices import Degrees
from sppo.planning.search.division import Rejection
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.solver import Solution, nearest_rejection
from sppo.planning.validation_plan import ValidationPlan
from sppo.planning.why_nothing_fits import rejected_lines
from sppo.units import counted, format_bytes, format_count, format_duration

Way = TypeVar("Way", bound=EvaluatedCandidate | PlannedDegrees)
"""Way to divide the devices: a candidate for the stream, or degrees with plans of drawn steps."""
Rows = Mapping[str, Callable[[Way], str]]
"""Functions that return the cell of a way, by the name of the row."""
DEGREES: Mapping[str, Callable[[EvaluatedCandidate | PlannedDegrees], str]] = {
    "sequence parallel": lambda way: str(way.degrees.sequence_parallel),
    "pipeline parallel": lambda way: str(way.degrees.pipeline_parallel),
    "data parallel": lambda way: str(way.degrees.data_parallel),
}

_FITS = ("step_s", "node_host_bytes")
_GAINS = ("step_s", "tokens_per_s", "device_peak_bytes")
"""Figures of the best candidate after a change that makes a request fit, or faster, in JSON."""


@dataclass(frozen=True)
class Answer(ABC, Generic[Way]):
    """Answer of ``sppo solve`` to a request.

    Attributes:
        solution: Solution, without a best way to divide the devices if nothing fits.
        changes: If nothing fits, changes of the request that would make it fit.
        train: Command that trains by the best plan.
        output: File that the best plan was written to; None if there is none.
        improvements: Changes of the request that would increase throughput, for an answer that also
            says where the seconds of the best step go; None for a short one.
        validation: Plan of the validations on the best layout; None if the run has none.
        effective: Effective training time by the best plan; None if it is not known.
    """

    solution: Solution | CorpusSolution
    changes: Sequence[Change] = ()
    train: str = ""
    output: Path | None = None
    improvements: Sequence[Change] | None = None
    validation: ValidationPlan | None = None
    effective: EffectiveTime | None = None

    @property
    def launch(self) -> tuple[str, ...]:
        """Commands that train by the best plan on the nodes of the machine."""
        per_node = self.solution.hardware.node.num_devices
        return launch_commands(self.ways[0].degrees, devices_per_node=per_node, train=self.train)

    @property
    def _left_over(self) -> int:
        """Number of devices that the best way does not use."""
        return self.solution.hardware.num_devices - self.ways[0].degrees.num_devices

    def json(self) -> dict[str, Any]:
        """Return the answer as JSON values; the best way is also the first of the candidates."""
        ways = [self._way_json(way) for way in self.ways]
        values: dict[str, Any] = {
            "feasible": bool(ways),
            "best": ways[0] if ways else None,
            "candidates": ways,
            "rejected": [_rejection_json(rejection) for rejection in self.solution.rejected],
            "hardware": hardware_json(self.solution.hardware),
        }
        if ways:
            values["devices_left_over"] = self._left_over
            values["effective_time"] = None if self.effective is None else asdict(self.effective)
            values["launch"] = list(self.launch)
            values["plan"] = None if self.output is None else str(self.output)
            values["improvements"] = None
            if self.improvements is not None:
                values["improvements"] = [
                    {"change": change.change, "gain": change.gain, **_figures(change, _GAINS)}
                    for change in self.improvements
                ]
                values["explanation"] = explanation_json(self._explained)
        else:
            nearest = nearest_rejection(self.solution.rejected)
            values["nearest"] = None if nearest is None else _rejection_json(nearest)
            values["advice"] = [
                {"change": change.change, "effect": change.effect, **_figures(change, _FITS)}
                for change in self.changes
            ]
        return values | self._more_json() | validation_json(self.validation)

    def screen(self) -> Screen:
        """Yield the best way, its runners-up, launch commands, memory, and what does not work."""
        yield self._request_line
        yield f"on {hardware_line(self.solution.hardware)}"
        yield self._ways_table()
        yield from self._notes()
        yield from validation_line(self.validation)
        if self.effective is not None:
            yield f"effective training time: {self.effective.text()}"
        if left := self._left_over:
            yield (
                f"{left} of {counted(self.solution.hardware.num_devices, 'device')} "
                f"{'is' if left == 1 else 'are'} left over: more sequences or samples per step "
                "would use them"
            )
        for command in self.launch:
            yield Unbroken(f"launch: {command}")
        if self.output is None:
            yield "plan.json is not written yet: add -o plan.json"
        if self.improvements:
            yield ""
            yield "not asked for, and it would pay (tokens/s a device, against the best):"
            yield _improvements_table(self.improvements)
        yield ""
        yield from self._memory()
        yield from _rejected_lines(self.solution.rejected)
        if self.improvements is not None:
            yield from explanation_screen(self._explained)
        if self.output is not None:
            simulate = f"sppo simulate {self.output}"
            yield Unbroken(f"written {self.output}: {simulate}, {self.train}")

    def _ways_table(self) -> Table:
        """Return a table with a column for each way to divide the devices."""
        rows: list[Sequence[str] | None] = []
        for section in self._sections():
            for name, text in section.items():
                rows.append([name, *(text(way) for way in self.ways)])
            rows.append(None)
        headings = ["", "best", *(f"next {place}" for place in range(1, len(self.ways)))]
        return table(headings, rows)

    def _speed_rows(self, tokens_per_s: Callable[[Way], float]) -> Rows[Way]:
        """Return rows of the seconds of a step, and of the rate of all devices."""
        best_s = self.ways[0].step_s
        return {
            "step": lambda way: step_text(way.step_s),
            "against the best": lambda way: f"{way.step_s / best_s:.3f}x",
            "tokens/s a device": lambda way: f"{tokens_per_s(way) / way.degrees.num_devices:.4g}",
            "tokens/s in total": lambda way: format_count(tokens_per_s(way)),
        }

    # What differs between the stream and samples

    @property
    @abstractmethod
    def ways(self) -> Sequence[Way]:
        """Best way to divide the devices, then the runners-up; empty if nothing fits."""

    @property
    @abstractmethod
    def _explained(self) -> EvaluatedCandidate:
        """Candidate whose seconds are explained."""

    @abstractmethod
    def _way_json(self, way: Way) -> dict[str, Any]:
        """Return a way to divide the devices as JSON values."""

    @abstractmethod
    def _more_json(self) -> dict[str, Any]:
        """Return further JSON values."""

    @property
    @abstractmethod
    def _request_line(self) -> str:
        """Line about the model and the step that were asked for."""

    @abstractmethod
    def _sections(self) -> Iterator[Rows[Way]]:
        """Yield rows of the choices, of the predicted step time, and of the peaks of memory."""

    @abstractmethod
    def _notes(self) -> Iterator[str]:
        """Yield lines below the table."""

    @abstractmethod
    def _memory(self) -> Screen:
        """Yield the memory of the best way."""


def _figures(change: Change, names: Sequence[str]) -> dict[str, Any]:
    """Return figures of the best candidate after a change; None if the change has none."""
    return {name: getattr(change.best, name, None) for name in names}


def _rejection_json(rejection: Rejection) -> dict[str, Any]:
    return {
        **rejection.degrees.by_name,
        "num_subsequences": rejection.num_subsequences,
        "policy": rejection.policy,
        "reason": rejection.reason,
        "shortfall": shortfall_json(rejection.shortfall),
    }


def _rejected_lines(rejected: Sequence[Rejection]) -> Iterator[str]:
    """Yield the reasons why other degrees do not work, each with an example."""
    if len(rejected) == 1:
        yield "1 other way does not work (--json lists it):"
    elif rejected:
        yield f"{len(rejected)} other ways do not work (--json lists them):"
    yield from rejected_lines(rejected)


def _improvements_table(improvements: Sequence[Change]) -> Table:
    return columns(
        [
            f" {change.change}",
            f"{change.gain:.2f}x",
            f"{step_text(change.best.step_s)} a step",
            f"{format_bytes(change.best.device_peak_bytes)} a device",
        ]
        for change in improvements
        if change.best is not None
    )


def step_text(seconds: float) -> str:
    """Format seconds with four digits; `format_duration` would hide differences of candidates."""
    return f"{seconds:.4g} s" if 1 <= seconds < 1000 else format_duration(seconds)


def launch_commands(degrees: Degrees, *, devices_per_node: int, train: str) -> tuple[str, ...]:
    """Return the commands that train by a plan: sppo on one node, torchrun and srun on several.

    Args:
        degrees: Degrees of the plan.
        devices_per_node: Devices of each node of the machine.
        train: Command that trains by the plan.
    """
    devices, group = degrees.num_devices, degrees.sequence_parallel
    if devices <= devices_per_node:
        return (train,)
    # Equal numbers on all nodes; no sequence-parallel group spans nodes if it fits on one.
    group = group if group <= devices_per_node else 1
    each = max(n for n in range(1, devices_per_node + 1) if devices % n == 0 and n % group == 0)
    nodes = devices // each
    meeting = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {each} {meeting} -m {train}",
        f"srun --nodes {nodes} --ntasks-per-node {each} {train}",
    )
