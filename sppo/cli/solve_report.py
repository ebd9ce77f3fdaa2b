"""What the answers of ``sppo solve`` for the stream and for samples have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from sppo.cli.candidate import hardware_json
from sppo.cli.printing import Screen, Unbroken, table
from sppo.planning.advice import Advice
from sppo.planning.corpus.search import CorpusSolution
from sppo.planning.improvements import Improvement
from sppo.planning.search.choices import Degrees
from sppo.planning.search.division import Rejection
from sppo.planning.search.solver import Solution
from sppo.units import format_duration

Rows = Mapping[str, Callable[[Any], str]]
"""Functions that return the cell of a way to divide the devices, by the name of the row."""
DEGREES: Rows = {
    "sequence parallel": lambda way: str(way.degrees.sequence_parallel),
    "pipeline parallel": lambda way: str(way.degrees.pipeline_parallel),
    "data parallel": lambda way: str(way.degrees.data_parallel),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of ``sppo solve`` to a request.

    Attributes:
        solution: Solution, without a best way to divide the devices if nothing fits.
        changes: If nothing fits, changes of the request that would make it fit.
        train: Command that trains by the best plan.
        launch: Commands that train by it on the nodes of the machine.
        output: File that the best plan was written to; None if there is none.
        improvements: Changes of the request that would increase throughput, for an answer that also
            says where the seconds of the best step go; None for a short one.
    """

    solution: Solution | CorpusSolution
    changes: Sequence[Advice] = ()
    train: str = ""
    launch: Sequence[str] = ()
    output: Path | None = None
    improvements: Sequence[Improvement] | None = None

    @property
    def ways(self) -> list[Any]:
        """Best way to divide the devices, then the runners-up; [] if nothing fits."""
        best = self.solution.best
        return [] if best is None else [best, *self.solution.runners_up]

    @property
    def devices_left_over(self) -> int:
        """Number of devices that the best way does not use."""
        return int(self.solution.hardware.num_devices - self.ways[0].degrees.num_devices)


def answer_json(
    answer: Answer,
    *,
    way_json: Callable[[Any], dict[str, Any]],
    rejection_json: Callable[[Rejection], dict[str, Any]],
    nearest: Rejection | None,
) -> dict[str, Any]:
    """Return an answer as JSON values; the best way is also the first of the candidates.

    Args:
        answer: Answer to a request.
        way_json: Function that returns a way to divide the devices as JSON values.
        rejection_json: Function that returns rejected degrees as JSON values.
        nearest: Rejected degrees that are nearest to fitting.
    """
    ways = [way_json(way) for way in answer.ways]
    values: dict[str, Any] = {
        "feasible": bool(ways),
        "best": ways[0] if ways else None,
        "candidates": ways,
        "rejected": [rejection_json(rejection) for rejection in answer.solution.rejected],
        "hardware": hardware_json(answer.solution.hardware),
    }
    if not ways:
        values["nearest"] = None if nearest is None else rejection_json(nearest)
        values["advice"] = [asdict(advice) for advice in answer.changes]
        return values
    values["devices_left_over"] = answer.devices_left_over
    values["launch"] = list(answer.launch)
    values["plan"] = None if answer.output is None else str(answer.output)
    return values


def ways_table(answer: Answer, *sections: Rows) -> Table:
    """Return a table with a column for each way to divide the devices."""
    rows: list[Sequence[str] | None] = []
    for section in sections:
        rows += [[name, *map(text, answer.ways)] for name, text in section.items()]
        rows.append(None)
    headings = ["", "best", *(f"next {place}" for place in range(1, len(answer.ways)))]
    return table(headings, rows)


def launch_lines(answer: Answer) -> Screen:
    """Yield the commands that train by the plan, and how to write the plan if it is in no file."""
    for command in answer.launch:
        yield Unbroken(f"launch: {command}")
    if answer.output is None:
        yield "plan.json is not written yet: add -o plan.json"


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
