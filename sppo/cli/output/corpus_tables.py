"""Text output of ``sppo solve`` with data.samples=documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table

from sppo.cli.output.corpus_json import sides_report
from sppo.cli.output.memory_table import print_memory
from sppo.cli.output.solve_tables import step_text
from sppo.cli.output.solve_text import degrees_text, launch_commands
from sppo.cost.parameters import num_parameters
from sppo.hardware.run_hardware import hardware_line
from sppo.planning.advice import Advice
from sppo.planning.corpus.search import CorpusSolution, PlannedDegrees, fullest_rank
from sppo.planning.elastic.step_plan import StepPlan
from sppo.report.lines import print_line
from sppo.units import counted, format_bytes, format_count, format_tokens

_SHOWN_REFUSED = 4
_SIDE_TEXTS = {
    "padded": "a  padded",
    "stream": "b  stream rows",
    "fixed": "c  fixed chunks",
    "elastic": "d  elastic",
}


def print_corpus_solution(
    solution: CorpusSolution, *, output: Path | None, train: str, console: Console
) -> None:
    """Print the best division of the devices, its runners-up, packings and memory.

    Args:
        solution: Solution with a best division.
        output: File that the plan of the longest samples was written to; None if there is none.
        train: Command that trains by the plan.
        console: Console to print to.
    """
    assert solution.best is not None, "print_corpus_failure is for the other case"
    best = solution.best
    _print_request(solution, console=console)
    console.print(_candidates_table(solution))
    _say(
        console,
        f"searched: {counted(solution.num_divisions, 'way')} to divide the devices, each with a "
        f"step of the longest samples; of {solution.num_planned} the drawn steps were planned and "
        "simulated, and of the best every replica and the longest sample alone fit in all of them",
    )
    left = solution.hardware.num_devices - best.degrees.num_devices
    if left:
        _say(console, f"{left} of {solution.hardware.num_devices} devices are left over")
    per_node = solution.hardware.node.num_devices
    for command in launch_commands(best.degrees, devices_per_node=per_node, train=train):
        print_line(f"launch: {command}", console, wraps=False)
    if output is None:
        _say(console, "plan.json is not written yet: add -o plan.json")
    console.print()
    _print_sides(solution, console=console)
    console.print()
    _say(console, "the drawn step that takes most memory:")
    print_memory(best.fullest.evaluated, console=console)
    longest, rank = best.longest, fullest_rank(best.longest.memory)
    _say(
        console,
        f"a step of the longest samples, of {format_tokens(solution.run.sequence.length)} tokens: "
        f"{format_bytes(longest.memory[rank].device.total_bytes)} on rank {rank}, policy "
        f"{longest.effective_policy}, K and V {longest.kv}",
    )
    _print_refused(solution, console=console)


def print_corpus_failure(
    solution: CorpusSolution, *, changes: Sequence[Advice], console: Console
) -> None:
    """Print which memory is short, for which sample and stage, and what would fit."""
    model = solution.run.model
    _say(
        console,
        f"error: nothing fits: {model.preset or model.from_hf or 'model'}, samples of up to "
        f"{format_tokens(solution.run.sequence.length)} tokens, on "
        f"{hardware_line(solution.hardware)}",
    )
    if solution.refused:
        nearest = solution.refused[0]
        _say(console, f"nearest: {degrees_text(nearest.degrees)}")
        _say(console, f" {nearest.reason}")
    _say(console, f"none of {solution.num_divisions} ways to divide the devices works")
    if changes:
        _say(console, "what would fit (closed form):")
        for advice in changes:
            _say(console, f" {advice.change}  {advice.effect}")


def _print_request(solution: CorpusSolution, *, console: Console) -> None:
    run, steps = solution.run, solution.steps
    name = run.model.preset or run.model.from_hf or "model"
    samples = [len(lengths) for lengths in steps.lengths]
    _say(
        console,
        f"{name} ({format_count(num_parameters(run.model))} parameters), samples of up to "
        f"{format_tokens(run.sequence.length)} tokens, {run.train.dtype}",
    )
    _say(console, f"on {hardware_line(solution.hardware)}")
    counts = f"{min(samples)} to {max(samples)}" if min(samples) < max(samples) else f"{samples[0]}"
    _say(
        console,
        f"{len(samples)} steps drawn from {steps.source}, of {counts} samples and "
        f"{format_count(steps.num_tokens / len(samples))} tokens each; the longest have "
        f"{', '.join(format_tokens(max(lengths)) for lengths in steps.lengths)}",
    )


def _candidates_table(solution: CorpusSolution) -> Table:
    """Return a table of the best division and its runners-up, one column each."""
    assert solution.best is not None, "checked by the caller"
    ways = (solution.best, *solution.runners_up)
    steps = solution.steps
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for place in range(len(ways)):
        heading = "best" if place == 0 else f"next {place}"
        table.add_column(heading, justify="right", overflow="fold")

    def add(name: str, value: Callable[[PlannedDegrees], str]) -> None:
        table.add_row(name, *map(value, ways))

    add("sequence parallel", lambda way: str(way.degrees.sequence_parallel))
    add("pipeline parallel", lambda way: str(way.degrees.pipeline_parallel))
    add("data parallel", lambda way: str(way.degrees.data_parallel))
    add("stages on a rank", lambda way: str(way.longest.candidate.virtual_stages))
    add("schedule", lambda way: _each(plan.evaluated.candidate.schedule for plan in way.plans))
    add("chunks of a step", lambda way: _span(len(_lengths(plan)) for plan in way.plans))
    add("  tokens, median", lambda way: _span(int(median(_lengths(plan))) for plan in way.plans))
    add("  tokens, most", lambda way: _span(max(_lengths(plan)) for plan in way.plans))
    add("policy", lambda way: _each(plan.evaluated.effective_policy for plan in way.plans))
    table.add_section()
    add("step", lambda way: step_text(way.seconds / len(steps.lengths)))
    add("against the best", lambda way: f"{way.seconds / ways[0].seconds:.3f}x")
    add("in closed form", lambda way: step_text(way.closed_s / len(steps.lengths)))
    add("tokens/s in total", lambda way: format_count(steps.num_tokens / way.seconds))
    add(
        "tokens/s a device",
        lambda way: f"{steps.num_tokens / way.seconds / way.degrees.num_devices:.4g}",
    )
    add("bubble", lambda way: f"{way.bubble_fraction:.1%}")
    table.add_section()
    add("device peak", lambda way: format_bytes(way.fullest.evaluated.device_peak_bytes))
    add("  longest samples", lambda way: format_bytes(way.longest.device_peak_bytes))
    return table


def _print_sides(solution: CorpusSolution, *, console: Console) -> None:
    _say(console, "the same samples with the best degrees, packed in other ways (simulated):")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("step", "tokens/s", "of c", "bubble", "largest", "peak"):
        table.add_column(heading, justify="right", no_wrap=True)
    report = sides_report(solution)
    for name, text in _SIDE_TEXTS.items():
        side = report[name]
        if not side["fits"]:
            table.add_row(text, "does not fit")
            continue
        over = side["over_fixed"]
        table.add_row(
            text,
            step_text(side["step_s"]),
            format_count(side["tokens_per_s"]),
            "" if over is None else f"{over:.2f}x",
            f"{side['bubble_fraction']:.1%}",
            str(side["chunk_tokens"]),
            format_bytes(side["device_peak_bytes"]),
        )
    console.print(table)
    for name, side in report.items():
        if not side["fits"]:
            _say(console, f" {name}: {side['reason']}")
    _say(
        console,
        "b cuts samples at the ends of rows: what follows a cut does not see what was before it",
    )


def _print_refused(solution: CorpusSolution, *, console: Console) -> None:
    if not solution.refused:
        return
    _say(console, f"{len(solution.refused)} other ways do not work (--json lists them):")
    for refused in solution.refused[:_SHOWN_REFUSED]:
        _say(console, f" {degrees_text(refused.degrees)}: {refused.reason}")


def _lengths(plan: StepPlan) -> tuple[int, ...]:
    return plan.evaluated.candidate.lengths


def _each(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _span(counts: Iterable[int]) -> str:
    found = sorted(counts)
    return str(found[0]) if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


def _say(console: Console, text: str) -> None:
    print_line(text, console)
