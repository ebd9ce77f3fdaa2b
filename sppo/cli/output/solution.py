"""Report of ``sppo solve``: the best candidate, the runners-up, and rejected candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from sppo.cli.output.candidate import (
    candidate_json,
    degrees_json,
    hardware_json,
    launch_commands,
    policy_text,
    print_launch,
    shortfall_json,
    step_text,
)
from sppo.cli.output.explanation import explanation_json, print_explanation
from sppo.cli.output.memory import print_memory
from sppo.cli.output.printing import columns, say, table
from sppo.cost.state_tiers import ON_DEVICE
from sppo.hardware.run_hardware import hardware_line
from sppo.planning.advice import Advice, too_long_for
from sppo.planning.improvements import Improvement
from sppo.planning.make_plan import predict
from sppo.planning.plan import Prediction
from sppo.planning.search.division import Rejection
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.solver import Solution, nearest_rejection
from sppo.planning.why_nothing_fits import rejected_groups, run_line
from sppo.units import counted, format_bytes, format_count, format_duration

MFU_DEFINITION = (
    "causal model FLOPs, nothing recomputed (6·weights·tokens + 6·S²·heads·head size a layer), "
    "over time · devices · peak"
)
_BAR_WIDTH = 24
_SHOWN_RATIOS = 10


@dataclass(frozen=True, slots=True)
class SolutionReport:
    """Report of a solution of the solver.

    Attributes:
        solution: Solution with a best candidate.
        train: Command that trains by the plan.
        output: File that the best plan was written to; None if there is none.
        improvements: Changes of the request that would increase throughput, for a report that also
            says where the seconds of the best step go; None for a short report.
    """

    solution: Solution
    train: str
    output: Path | None = None
    improvements: Sequence[Improvement] | None = None

    @property
    def best(self) -> EvaluatedCandidate:
        """Best candidate."""
        assert self.solution.best is not None, "a report of what fits"
        return self.solution.best

    @property
    def launch(self) -> tuple[str, ...]:
        """Commands that train by the plan."""
        per_node = self.solution.hardware.node.num_devices
        return launch_commands(self.best.degrees, devices_per_node=per_node, train=self.train)

    @property
    def devices_left_over(self) -> int:
        """Number of devices that the best candidate does not use."""
        return self.solution.hardware.num_devices - self.best.degrees.num_devices

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values; the best candidate is also the first of them."""
        solution, run = self.solution, self.solution.run
        report: dict[str, Any] = {
            "feasible": True,
            "best": candidate_json(run, self.best),
            "candidates": [
                candidate_json(run, evaluated) for evaluated in (self.best, *solution.runners_up)
            ],
            "rejected": [_rejection_json(rejection) for rejection in solution.rejected],
            "by_num_subsequences": [
                {
                    "num_subsequences": len(evaluated.candidate.lengths),
                    "step_s": evaluated.step_s,
                    "policy": evaluated.effective_policy,
                    "kv": evaluated.kv,
                    "state": asdict(evaluated.candidate.state),
                    "simulated": evaluated.simulated is not None,
                }
                for evaluated in solution.by_num_subsequences
            ],
            "improvements": None,
            "devices_left_over": self.devices_left_over,
            "launch": list(self.launch),
            "hardware": hardware_json(solution.hardware),
            "mfu_definition": MFU_DEFINITION,
            "plan": None if self.output is None else str(self.output),
        }
        if self.improvements is not None:
            report["improvements"] = [asdict(improvement) for improvement in self.improvements]
            report["explanation"] = explanation_json(self.best)
        return report

    def show(self, console: Console) -> None:
        """Print the best candidate, its runners-up, launch commands and memory."""
        solution, best = self.solution, self.best
        say(console, run_line(solution.run), f"on {hardware_line(solution.hardware)}")
        _print_candidates(solution, console=console)
        say(console, *self._remarks())
        print_launch(self.launch, output=self.output, console=console)
        _print_improvements(self.improvements or (), console=console)
        _print_numbers_of_subsequences(solution, console=console)
        console.print()
        print_memory(best, console=console)
        say(console, *_rejected_lines(solution))
        say(console, "words: docs/glossary.md; what is decided, and how: docs/planning.md")
        if self.improvements is not None:
            print_explanation(best, console=console)
        if self.output is not None:
            written = f"written {self.output}: sppo simulate {self.output}, {self.train}"
            say(console, written, wraps=False)

    def _remarks(self) -> Iterator[str]:
        """Yield lines about the policy of the best candidate, and about how it was chosen."""
        best, solution = self.best, self.solution
        yield f"policy {best.effective_policy}: {policy_text(best)}"
        ratios = predict(solution.run, best).offload_ratios
        if any(ratios):
            yield _offload_ratios_line(ratios)
        yield f"MFU: {MFU_DEFINITION}"
        if any(other.step_s < best.step_s for other in solution.runners_up):
            yield "of divisions within 1 % of the fastest, the best takes least host memory"
        left = self.devices_left_over
        if left:
            yield (
                f"{left} of {counted(solution.hardware.num_devices, 'device')} "
                f"{'is' if left == 1 else 'are'} left over: more sequences per step "
                "(train.sequences_per_step) would use them"
            )


def failure_json(solution: Solution, *, changes: Sequence[Advice]) -> dict[str, Any]:
    """Return why nothing fits, and which changes would make it fit, as JSON values."""
    nearest = nearest_rejection(solution.rejected)
    return {
        "feasible": False,
        "best": None,
        "candidates": [],
        "nearest": None if nearest is None else _rejection_json(nearest),
        "too_long": too_long_for(solution.run, hardware=solution.hardware),
        "advice": [asdict(advice) for advice in changes],
        "rejected": [_rejection_json(rejection) for rejection in solution.rejected],
        "hardware": hardware_json(solution.hardware),
    }


def _rejection_json(rejection: Rejection) -> dict[str, Any]:
    return {
        **degrees_json(rejection.degrees),
        "num_subsequences": rejection.num_subsequences,
        "policy": rejection.policy,
        "reason": rejection.reason,
        "shortfall": shortfall_json(rejection.shortfall),
    }


def _print_candidates(solution: Solution, *, console: Console) -> None:
    """Print a table of the best candidate and its runners-up, one column each."""
    assert solution.best is not None, "a table of what fits"
    candidates = (solution.best, *solution.runners_up)
    headings = ["", "best", *(f"next {place}" for place in range(1, len(candidates)))]
    compared = [(evaluated, predict(solution.run, evaluated)) for evaluated in candidates]
    console.print(table(headings, _candidate_rows(compared, solution)))


def _candidate_rows(
    compared: Sequence[tuple[EvaluatedCandidate, Prediction]], solution: Solution
) -> list[Sequence[str] | None]:
    """Return rows of the choices, the predicted step time, and the peaks of memory."""
    best, _ = compared[0]
    rows: list[Sequence[str] | None] = []

    def add(
        name: str, text: Callable[[EvaluatedCandidate, Prediction], str], *, unless: str = ""
    ) -> None:
        """Add a row of texts, unless all of them are `unless`."""
        texts = [text(evaluated, predicted) for evaluated, predicted in compared]
        if set(texts) != {unless}:
            rows.append([name, *texts])

    add("sequence parallel", lambda o, _: str(o.degrees.sequence_parallel))
    add("pipeline parallel", lambda o, _: str(o.degrees.pipeline_parallel))
    add("data parallel", lambda o, _: str(o.degrees.data_parallel))
    used = str(best.degrees.num_devices)
    add("devices used", lambda o, _: str(o.degrees.num_devices), unless=used)
    add("subsequences (N)", lambda o, _: str(len(o.candidate.lengths)))
    add("tokens of each", lambda o, _: _lengths_text(o.candidate.lengths))
    add("schedule", lambda o, _: o.candidate.schedule)
    add("stages on a rank", lambda o, _: str(o.candidate.virtual_stages), unless="1")
    add("K/V placement", lambda o, _: o.kv, unless="retained")
    add("state", lambda o, _: o.candidate.state.text(), unless=ON_DEVICE.text())
    add("policy", lambda o, _: o.effective_policy)
    add("offload ratio", lambda _, p: _ratios_text(p.offload_ratios))
    if any(any(predicted.offload_ratios) for _, predicted in compared):
        add("  its mean", lambda _, p: f"{sum(p.offload_ratios) / len(p.offload_ratios):.2f}")
    rows.append(None)
    add("step", lambda o, _: step_text(o.step_s))
    add("against the best", lambda o, _: f"{o.step_s / best.step_s:.3f}x")
    add("step time is", lambda _, p: "simulated" if p.simulated else "closed form")
    add("tokens/s a device", lambda _, p: f"{p.tokens_per_s_per_gpu:.4g}")
    add(
        "tokens/s in total",
        lambda o, p: format_count(p.tokens_per_s_per_gpu * o.degrees.num_devices),
    )
    add("MFU", lambda _, p: f"{p.mfu:.1%}")
    add("bubble", lambda _, p: f"{p.bubble_fraction:.1%}")
    add("exposed copies", lambda _, p: format_duration(p.exposed_copy_s))
    rows.append(None)
    add("device peak", lambda _, p: format_bytes(p.device_peak_bytes))
    if solution.hardware.device.kind != "cpu":
        add("host peak", lambda _, p: format_bytes(p.host_peak_bytes))
        add("  of a node", lambda o, _: format_bytes(o.node_host_bytes), unless=format_bytes(0))
    has_disk = solution.hardware.node.disk_bytes > 0
    add(
        "disk peak",
        lambda _, p: format_bytes(p.disk_peak_bytes),
        unless="" if has_disk else format_bytes(0),
    )
    return rows


def _lengths_text(lengths: Sequence[int]) -> str:
    """Return the first length, and the last one if it differs."""
    first, last = lengths[0], lengths[-1]
    return str(first) if first == last else f"{first} … {last}"


def _ratios_text(ratios: Sequence[float]) -> str:
    """Return the first and last offload ratio as text; "none" if all are 0."""
    return f"{ratios[0]:.2f} … {ratios[-1]:.2f}" if any(ratios) else "none"


def _offload_ratios_line(ratios: Sequence[float]) -> str:
    """Return a line with at most ten evenly spaced ratios, including the first and the last."""
    count = min(len(ratios), _SHOWN_RATIOS)
    places = np.linspace(0, len(ratios) - 1, count).round().astype(int)
    shown = " ".join(f"{ratios[place]:.2f}" for place in places)
    of_all = f" ({count} of {len(ratios)})" if count < len(ratios) else ""
    return f"offload ratio, first to last subsequence{of_all}: {shown}"


def _print_improvements(improvements: Sequence[Improvement], *, console: Console) -> None:
    """Print changes of the request that would increase throughput, as they are typed."""
    if not improvements:
        return
    console.print()
    say(console, "not asked for, and it would pay (tokens/s a device, against the best):")
    rows = (
        [
            f" {improvement.change}",
            f"{improvement.gain:.2f}x",
            f"{step_text(improvement.step_s)} a step",
            f"{format_bytes(improvement.device_peak_bytes)} a device",
        ]
        for improvement in improvements
    )
    console.print(columns(rows))


def _print_numbers_of_subsequences(solution: Solution, *, console: Console) -> None:
    """Print the step time over N for the best degrees; bars show the time above the best N."""
    candidates = solution.by_num_subsequences
    if len(candidates) < 2:
        return
    assert solution.best is not None, "checked by the caller"
    chosen = len(solution.best.candidate.lengths)
    least, most = (pick(evaluated.time.step_s for evaluated in candidates) for pick in (min, max))
    console.print()
    say(
        console,
        f"step over N with {solution.best.degrees.text()}, schedule "
        f"{candidates[0].candidate.schedule} (closed form); bars: time above the best N",
    )
    rows = []
    for evaluated in candidates:
        num_subsequences, step_s = len(evaluated.candidate.lengths), evaluated.time.step_s
        width = round(_BAR_WIDTH * (step_s - least) / (most - least)) if most > least else 0
        mark = " ◀ chosen" if num_subsequences == chosen else ""
        bar = f"{'█' * width}{mark}"
        rows.append(
            [f" N {num_subsequences}", step_text(step_s), f"+{step_s / least - 1:.1%}", bar]
        )
    console.print(columns(rows, right=3))


def _rejected_lines(solution: Solution) -> Iterator[str]:
    """Yield lines about the rejected candidates, grouped by the reason."""
    groups = rejected_groups(solution.rejected)
    total = sum(group.count for group in groups)
    if total == 1:
        yield "1 other way does not work (--json lists it):"
    elif total:
        yield f"{total} other ways do not work (--json lists them):"
    for group in groups:
        yield f" {group.count:>3} × {group.reason}"
        if group.example:
            yield f"     {group.example}"
