"""Text output of ``sppo solve``: the best candidate, the runners-up, and rejected candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from sppo.cli.output.memory_table import print_memory
from sppo.cli.output.solve_json import MFU_DEFINITION
from sppo.cli.output.solve_text import (
    degrees_text,
    launch_commands,
    lengths_text,
    offload_ratios_line,
    policy_text,
    ratio_text,
    rejected_groups,
)
from sppo.config.run import RunConfig
from sppo.cost.parameters import num_parameters
from sppo.hardware.description import HardwareSpec
from sppo.hardware.run_hardware import hardware_line
from sppo.planning.improvements import Improvement
from sppo.planning.make_plan import predict
from sppo.planning.plan import Prediction
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.solver import Solution
from sppo.report.lines import print_line
from sppo.units import counted, format_bytes, format_count, format_duration, format_tokens

if TYPE_CHECKING:
    from sppo.planning.ablation import AblationRow

_BAR_WIDTH = 24
_SHOWN_NUMBERS = 8


def run_line(run: RunConfig) -> str:
    """Return the model, the sequences of a step and the precision of a run as one line."""
    model, sequences = run.model, run.train.sequences_per_step
    name = model.preset or model.from_hf or "model"
    return (
        f"{name} ({format_count(num_parameters(model))} parameters), "
        f"{counted(sequences, 'sequence')} "
        f"of {format_tokens(run.sequence.length)} tokens a step, {run.train.dtype}"
    )


def step_text(seconds: float) -> str:
    """Format seconds with four digits; `format_duration` would hide differences of candidates."""
    return f"{seconds:.4g} s" if 1 <= seconds < 1000 else format_duration(seconds)


def print_solution(
    solution: Solution,
    *,
    paying: Sequence[Improvement],
    output: Path | None,
    train: str,
    console: Console,
    whole: bool = False,
) -> None:
    """Print the best candidate, its runners-up, launch commands and memory.

    Args:
        solution: Solution with a best candidate.
        paying: Changes of the request that would increase throughput.
        output: File that the best plan was written to; None if there is none.
        train: Command that trains by the plan.
        console: Console to print to.
        whole: Whether to print the step time of every N that was tried.
    """
    assert solution.best is not None, "print_failure is for the other case"
    best, hardware = solution.best, solution.hardware
    _say(console, run_line(solution.run))
    _say(console, f"on {hardware_line(hardware)}")
    console.print(_option_table(solution))
    _say(console, f"policy {best.effective_policy}: {policy_text(best)}")
    ratios = predict(solution.run, best).offload_ratios
    if any(ratios):
        _say(console, offload_ratios_line(ratios))
    _say(console, f"MFU: {MFU_DEFINITION}")
    if any(other.step_s < best.step_s for other in solution.runners_up):
        _say(console, "of divisions within 1 % of the fastest, the best takes least host memory")
    left = hardware.num_devices - best.degrees.num_devices
    if left:
        _say(
            console,
            f"{left} of {counted(hardware.num_devices, 'device')} "
            f"{'is' if left == 1 else 'are'} left over: more sequences per step "
            "(train.sequences_per_step) would use them",
        )
    per_node = hardware.node.num_devices
    for command in launch_commands(best.degrees, devices_per_node=per_node, train=train):
        print_line(f"launch: {command}", console, wraps=False)
    if output is None:
        _say(console, "plan.json is not written yet: add -o plan.json")
    _print_improvements(paying, console=console)
    _print_numbers_of_subsequences(solution, whole=whole, console=console)
    console.print()
    print_memory(best, console=console)
    _print_rejected(solution, console=console)
    _say(console, "words: docs/glossary.md; what is decided, and how: docs/planning.md")


_Row = tuple[str, Callable[[EvaluatedCandidate, Prediction], str]]
"""Name of a row, and the function that returns its text for a candidate."""
_Compared = Sequence[tuple[EvaluatedCandidate, Prediction]]


def _option_table(solution: Solution) -> Table:
    """Return a table of the best candidate and its runners-up, one column each."""
    assert solution.best is not None, "checked by the caller"
    candidates = (solution.best, *solution.runners_up)
    compared = [(evaluated, predict(solution.run, evaluated)) for evaluated in candidates]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for place in range(len(candidates)):
        table.add_column("best" if place == 0 else f"next {place}", justify="right")
    memory = _memory_rows(compared, solution.hardware)
    for rows in (_choice_rows(compared), _speed_rows(compared), memory):
        table.add_section()
        for name, text in rows:
            table.add_row(name, *(text(evaluated, predicted) for evaluated, predicted in compared))
    return table


def _choice_rows(compared: _Compared) -> Iterator[_Row]:
    """Yield rows of the choices; a choice that all candidates leave at its default has no row."""
    candidates = [evaluated for evaluated, _ in compared]
    yield "sequence parallel", lambda o, _: str(o.degrees.sequence_parallel)
    yield "pipeline parallel", lambda o, _: str(o.degrees.pipeline_parallel)
    yield "data parallel", lambda o, _: str(o.degrees.data_parallel)
    if len({evaluated.degrees.num_devices for evaluated in candidates}) > 1:
        yield "devices used", lambda o, _: str(o.degrees.num_devices)
    yield "subsequences (N)", lambda o, _: str(len(o.candidate.lengths))
    yield "tokens of each", lambda o, _: lengths_text(o.candidate.lengths)
    yield "schedule", lambda o, _: o.candidate.schedule
    if any(evaluated.candidate.virtual_stages > 1 for evaluated in candidates):
        yield "stages on a rank", lambda o, _: str(o.candidate.virtual_stages)
    if any(evaluated.kv != "retained" for evaluated in candidates):
        yield "K/V placement", lambda o, _: o.kv
    if any(evaluated.candidate.state.leaves_device for evaluated in candidates):
        yield "state", lambda o, _: o.candidate.state.text()
    yield "policy", lambda o, _: o.effective_policy
    yield "offload ratio", lambda _, p: ratio_text(p.offload_ratios)
    if any(any(predicted.offload_ratios) for _, predicted in compared):
        yield "  its mean", lambda _, p: f"{sum(p.offload_ratios) / len(p.offload_ratios):.2f}"


def _speed_rows(compared: _Compared) -> Iterator[_Row]:
    """Yield rows of the predicted step time and of figures that are computed from it."""
    best_s = compared[0][0].step_s
    yield "step", lambda o, _: step_text(o.step_s)
    yield "against the best", lambda o, _: f"{o.step_s / best_s:.3f}x"
    yield "step time is", lambda _, p: "simulated" if p.simulated else "closed form"
    yield "tokens/s a device", lambda _, p: f"{p.tokens_per_s_per_gpu:.4g}"
    yield (
        "tokens/s in total",
        lambda o, p: format_count(p.tokens_per_s_per_gpu * o.degrees.num_devices),
    )
    yield "MFU", lambda _, p: f"{p.mfu:.1%}"
    yield "bubble", lambda _, p: f"{p.bubble_fraction:.1%}"
    yield "exposed copies", lambda _, p: format_duration(p.exposed_copy_s)


def _memory_rows(compared: _Compared, hardware: HardwareSpec) -> Iterator[_Row]:
    """Yield rows of the peak of each kind of memory that the machine has."""
    yield "device peak", lambda _, p: format_bytes(p.device_peak_bytes)
    if hardware.device.kind != "cpu":
        yield "host peak", lambda _, p: format_bytes(p.host_peak_bytes)
        if any(predicted.host_peak_bytes for _, predicted in compared):
            yield "  of a node", lambda o, _: format_bytes(o.node_host_bytes)
    if hardware.node.disk_bytes or any(predicted.disk_peak_bytes for _, predicted in compared):
        yield "disk peak", lambda _, p: format_bytes(p.disk_peak_bytes)


def _print_improvements(paying: Sequence[Improvement], *, console: Console) -> None:
    """Print changes of the request that would increase throughput, as they are typed."""
    if not paying:
        return
    console.print()
    _say(console, "not asked for, and it would pay (tokens/s a device, against the best):")
    table = Table(box=None, pad_edge=False, show_header=False)
    for improvement in paying:
        table.add_row(
            f" {improvement.change}",
            f"{improvement.gain:.2f}x",
            f"{step_text(improvement.step_s)} a step",
            f"{format_bytes(improvement.device_peak_bytes)} a device",
        )
    console.print(table)


def _print_numbers_of_subsequences(solution: Solution, *, whole: bool, console: Console) -> None:
    """Print the step time over N for the best degrees; bars show the time above the best N."""
    candidates = solution.by_num_subsequences
    if len(candidates) < 2:
        return
    assert solution.best is not None, "checked by the caller"
    chosen = len(solution.best.candidate.lengths)
    least, most = (pick(evaluated.time.step_s for evaluated in candidates) for pick in (min, max))
    numbers = [len(evaluated.candidate.lengths) for evaluated in candidates]
    first = _first_shown(numbers, chosen=chosen)
    shown = candidates if whole else candidates[first : first + _SHOWN_NUMBERS]
    hidden = len(candidates) - len(shown)
    console.print()
    _say(
        console,
        f"step over N with {degrees_text(solution.best.degrees)}, schedule "
        f"{candidates[0].candidate.schedule} (closed form); bars: time above the best N"
        + (f"; --explain shows {hidden} more" if hidden else ""),
    )
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(justify="right")
    table.add_column()
    for evaluated in shown:
        num_subsequences, step_s = len(evaluated.candidate.lengths), evaluated.time.step_s
        lost = step_s / least - 1
        width = round(_BAR_WIDTH * (step_s - least) / (most - least)) if most > least else 0
        mark = " ◀ chosen" if num_subsequences == chosen else ""
        table.add_row(
            f" N {num_subsequences}",
            step_text(step_s),
            f"+{lost:.1%}",
            f"{'█' * width}{mark}",
        )
    console.print(table)


def _first_shown(numbers: Sequence[int], *, chosen: int) -> int:
    """Return the index of the first of the numbers N to show, so that the chosen N is among them.

    Another search than that over N may have chosen a number that is not in the list.
    """
    place = sum(number < chosen for number in numbers)
    return max(0, min(place - _SHOWN_NUMBERS // 2, len(numbers) - _SHOWN_NUMBERS))


def _print_rejected(solution: Solution, *, console: Console) -> None:
    groups = rejected_groups(solution.rejected)
    if not groups:
        return
    total = sum(group.count for group in groups)
    ways = "1 other way does" if total == 1 else f"{total} other ways do"
    _say(console, f"{ways} not work (--json lists {'it' if total == 1 else 'them'}):")
    for group in groups:
        _say(console, f" {group.count:>3} × {group.reason}")
        if group.example:
            _say(console, f"     {group.example}")


def print_ablation(rows: Sequence[AblationRow], *, console: Console) -> None:
    """Print the speedup of each part of SPPO, beside the figures of the paper."""
    console.print()
    _say(
        console,
        "what each part is worth with the best degrees and cuts (simulated); the paper: GPT-13B, "
        "512K tokens, 64 A100s",
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("step", "speedup", "paper", "device peak"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in rows:
        table.add_row(
            row.name,
            step_text(row.step_s),
            f"{row.speedup:.2f}x",
            "" if row.paper is None else f"{row.paper:.2f}x",
            format_bytes(row.device_peak_bytes),
            "" if row.fits else "does not fit",
        )
    console.print(table)
    for row in rows:
        if row.note:
            _say(console, f" {row.name}: {row.note}")


def _say(console: Console, text: str) -> None:
    print_line(text, console)
