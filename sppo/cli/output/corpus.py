"""Report of ``sppo solve`` with data.samples=documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from sppo.cli.output.candidate import (
    degrees_json,
    hardware_json,
    launch_commands,
    memory_json,
    print_launch,
    stages_json,
    step_text,
)
from sppo.cli.output.explanation import explanation_json, print_explanation
from sppo.cli.output.memory import print_memory
from sppo.cli.output.printing import say, table
from sppo.hardware.run_hardware import hardware_line
from sppo.planning.advice import Advice
from sppo.planning.corpus.search import (
    CorpusSolution,
    DrawnSteps,
    PlannedDegrees,
    fullest_rank,
)
from sppo.planning.elastic.step_plan import StepPlan
from sppo.planning.search.division import Rejection
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.why_nothing_fits import model_text
from sppo.units import counted, format_bytes, format_count, format_tokens

_SHOWN_REFUSED = 4


@dataclass(frozen=True, slots=True)
class CorpusReport:
    """Report of a solution for drawn steps of samples.

    Attributes:
        solution: Solution with a best division of the devices.
        train: Command that trains by the plan.
        output: File that the plan of the longest samples was written to; None if there is none.
        png: File that a step was drawn into; None if there is none.
        explain: Whether to say where the seconds of a step go.
    """

    solution: CorpusSolution
    train: str
    output: Path | None = None
    png: Path | None = None
    explain: bool = False

    @property
    def best(self) -> PlannedDegrees:
        """Best division of the devices."""
        assert self.solution.best is not None, "a report of what fits"
        return self.solution.best

    @property
    def launch(self) -> tuple[str, ...]:
        """Commands that train by the plan."""
        per_node = self.solution.hardware.node.num_devices
        return launch_commands(self.best.degrees, devices_per_node=per_node, train=self.train)

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values; the best division is also the first candidate."""
        best, solution = self.best, self.solution
        report: dict[str, Any] = {
            "feasible": True,
            "corpus": _steps_json(solution),
            "best": _division_json(best, solution.steps),
            "candidates": [
                _division_json(way, solution.steps) for way in (best, *solution.runners_up)
            ],
            "rejected": [_refused_json(refused) for refused in solution.rejected],
            "searched": {
                "divisions": solution.num_divisions,
                "divisions_planned": solution.num_planned,
            },
            "devices_left_over": solution.hardware.num_devices - best.degrees.num_devices,
            "launch": list(self.launch),
            "hardware": hardware_json(solution.hardware),
            "plan": None if self.output is None else str(self.output),
        }
        if self.explain:
            report["explanation"] = explanation_json(best.plans[0].evaluated)
        return report

    def show(self, console: Console) -> None:
        """Print the best division of the devices, its runners-up, packings and memory."""
        best, solution = self.best, self.solution
        say(console, *_request_lines(solution))
        _print_divisions(solution, console=console)
        say(
            console,
            f"searched: {counted(solution.num_divisions, 'way')} to divide the devices, each with "
            f"a step of the longest samples; of {solution.num_planned} the drawn steps were "
            "planned and simulated, and of the best every replica and the longest sample alone fit "
            "in all of them",
        )
        left = solution.hardware.num_devices - best.degrees.num_devices
        if left:
            say(console, f"{left} of {solution.hardware.num_devices} devices are left over")
        print_launch(self.launch, output=self.output, console=console)
        console.print()
        say(console, "the drawn step that takes most memory:")
        print_memory(best.fullest.evaluated, console=console)
        longest, rank = best.longest, fullest_rank(best.longest.memory)
        say(
            console,
            f"a step of the longest samples, of {format_tokens(solution.run.sequence.length)} "
            f"tokens: {format_bytes(longest.memory[rank].device.total_bytes)} on rank {rank}, "
            f"policy {longest.effective_policy}, K and V {longest.kv}",
            *_refused_lines(solution),
        )
        if self.explain:
            print_explanation(best.plans[0].evaluated, console=console)
        if self.output is not None:
            say(console, f"written {self.output}: {self.train}", wraps=False)
        if self.png is not None:
            say(console, f"written {self.png}", wraps=False)


def corpus_failure_json(solution: CorpusSolution, *, changes: Sequence[Advice]) -> dict[str, Any]:
    """Return why nothing fits, and which changes would make it fit, as JSON values."""
    return {
        "feasible": False,
        "corpus": _steps_json(solution),
        "best": None,
        "candidates": [],
        "nearest": _refused_json(solution.rejected[0]) if solution.rejected else None,
        "advice": [asdict(advice) for advice in changes],
        "rejected": [_refused_json(refused) for refused in solution.rejected],
        "hardware": hardware_json(solution.hardware),
    }


def _steps_json(solution: CorpusSolution) -> dict[str, Any]:
    """Return the drawn steps as JSON values."""
    steps = solution.steps
    return {
        "source": steps.source,
        "description": steps.description,
        "longest_sample": solution.run.sequence.length,
        "steps": [
            {"samples": len(lengths), "tokens": sum(lengths), "longest": max(lengths)}
            for lengths in steps.lengths
        ],
    }


def _division_json(way: PlannedDegrees, steps: DrawnSteps) -> dict[str, Any]:
    """Return one way to divide the devices as JSON values."""
    rate = steps.num_tokens / way.seconds
    return {
        **degrees_json(way.degrees),
        "virtual_stages": way.longest.candidate.virtual_stages,
        "closed_form_step_s": way.closed_s / len(steps.lengths),
        "step_s": way.seconds / len(steps.lengths),
        "tokens_per_s": rate,
        "tokens_per_s_per_gpu": rate / way.degrees.num_devices,
        "bubble_fraction": way.bubble_fraction,
        "node_host_peak_bytes": way.node_host_bytes,
        "steps": [_step_json(plan) for plan in way.plans],
        "memory": _fullest_json(way.fullest.evaluated),
        "longest_sample": {
            "num_subsequences": len(way.longest.candidate.lengths),
            "subsequence_lengths": list(way.longest.candidate.lengths),
            "schedule": way.longest.candidate.schedule,
            "policy": way.longest.effective_policy,
            "kv": way.longest.kv,
            "state": asdict(way.longest.candidate.state),
            "memory": _fullest_json(way.longest),
            "stages": stages_json(way.longest),
        },
    }


def _step_json(plan: StepPlan) -> dict[str, Any]:
    """Return one drawn step of the replica with the most work as JSON values."""
    evaluated = plan.evaluated
    return {
        "samples": plan.num_samples,
        "tokens": plan.tokens,
        "step_s": plan.step_s,
        "bubble_fraction": plan.bubble_fraction,
        "schedule": evaluated.candidate.schedule,
        "policy": evaluated.effective_policy,
        "chunks": _chunks_json(plan),
        "paced": bool(evaluated.candidate.forwards_before_backward),
        "device_peak_bytes": evaluated.device_peak_bytes,
    }


def _chunks_json(plan: StepPlan) -> dict[str, Any]:
    """Return statistics of the subsequences of a step as JSON values."""
    lengths = plan.evaluated.candidate.lengths
    return {
        "count": len(lengths),
        "split": plan.num_split,
        "batched": plan.num_batched,
        "hybrid": plan.num_hybrid,
        "least_tokens": min(lengths),
        "median_tokens": int(median(lengths)),
        "most_tokens": max(lengths),
    }


def _fullest_json(evaluated: EvaluatedCandidate) -> dict[str, Any]:
    """Return the memory of the fullest pipeline rank, by bucket, as JSON values."""
    rank = fullest_rank(evaluated.memory)
    return {"rank": rank, **memory_json(evaluated.memory[rank])}


def _refused_json(refused: Rejection) -> dict[str, Any]:
    """Return one refused division of the devices as JSON values."""
    return {
        **degrees_json(refused.degrees),
        "reason": refused.reason,
        "short_bytes": None if refused.shortfall is None else refused.shortfall.short_bytes,
        "longest_sample_fits": refused.steps,
    }


def _request_lines(solution: CorpusSolution) -> Iterator[str]:
    """Yield lines about the model, the machine and the drawn steps."""
    run, steps = solution.run, solution.steps
    samples = [len(lengths) for lengths in steps.lengths]
    longest = ", ".join(format_tokens(max(lengths)) for lengths in steps.lengths)
    yield (
        f"{model_text(run)}, samples of up to {format_tokens(run.sequence.length)} tokens, "
        f"{run.train.dtype}"
    )
    yield f"on {hardware_line(solution.hardware)}"
    yield (
        f"{len(samples)} steps drawn from {steps.source}, of {_span(samples)} samples and "
        f"{format_count(steps.num_tokens / len(samples))} tokens each; the longest have {longest}"
    )


def _print_divisions(solution: CorpusSolution, *, console: Console) -> None:
    """Print a table of the best division and its runners-up, one column each."""
    assert solution.best is not None, "a table of what fits"
    best, steps = solution.best, solution.steps
    ways = (best, *solution.runners_up)
    rows: list[Sequence[str] | None] = []

    def add(name: str, value: Callable[[PlannedDegrees], str]) -> None:
        rows.append([name, *map(value, ways)])

    add("sequence parallel", lambda way: str(way.degrees.sequence_parallel))
    add("pipeline parallel", lambda way: str(way.degrees.pipeline_parallel))
    add("data parallel", lambda way: str(way.degrees.data_parallel))
    add("stages on a rank", lambda way: str(way.longest.candidate.virtual_stages))
    add("schedule", lambda way: _each(plan.evaluated.candidate.schedule for plan in way.plans))
    add("chunks of a step", lambda way: _span(len(_lengths(plan)) for plan in way.plans))
    add("  tokens, median", lambda way: _span(int(median(_lengths(plan))) for plan in way.plans))
    add("  tokens, most", lambda way: _span(max(_lengths(plan)) for plan in way.plans))
    add("policy", lambda way: _each(plan.evaluated.effective_policy for plan in way.plans))
    rows.append(None)
    add("step", lambda way: step_text(way.seconds / len(steps.lengths)))
    add("against the best", lambda way: f"{way.seconds / best.seconds:.3f}x")
    add("in closed form", lambda way: step_text(way.closed_s / len(steps.lengths)))
    add("tokens/s in total", lambda way: format_count(steps.num_tokens / way.seconds))
    add(
        "tokens/s a device",
        lambda way: f"{steps.num_tokens / way.seconds / way.degrees.num_devices:.4g}",
    )
    add("bubble", lambda way: f"{way.bubble_fraction:.1%}")
    rows.append(None)
    add("device peak", lambda way: format_bytes(way.fullest.evaluated.device_peak_bytes))
    add("  longest samples", lambda way: format_bytes(way.longest.device_peak_bytes))
    if solution.hardware.device.kind != "cpu":
        add("host memory of a node", lambda way: format_bytes(way.node_host_bytes))
    headings = ["", "best", *(f"next {place}" for place in range(1, len(ways)))]
    console.print(table(headings, rows))


def _refused_lines(solution: CorpusSolution) -> Iterator[str]:
    """Yield lines about the first of the divisions that do not work."""
    if solution.rejected:
        yield f"{len(solution.rejected)} other ways do not work (--json lists them):"
    for refused in solution.rejected[:_SHOWN_REFUSED]:
        yield f" {refused.degrees.text()}: {refused.reason}"


def _lengths(plan: StepPlan) -> tuple[int, ...]:
    return plan.evaluated.candidate.lengths


def _each(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _span(counts: Iterable[int]) -> str:
    found = sorted(counts)
    return str(found[0]) if found[0] == found[-1] else f"{found[0]} to {found[-1]}"
