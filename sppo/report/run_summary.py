"""Summary of a run: speed, loss and memory, and how well they were predicted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sppo.output_file import write_json
from sppo.report.lines import print_line
from sppo.report.metrics import StepMetrics, finite_or_none
from sppo.units import counted, format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Pair = tuple[float | None, float | None]
"""(predicted, measured) value; None if unknown."""

SUMMARY_FIELDS: Mapping[str, str] = {
    "name": "Name of the output directory.",
    "steps": "Steps of the whole run, those before a resumption included.",
    "skipped_steps": "Steps whose update was left out.",
    "tokens": "Tokens trained in all steps.",
    "wall_s": "Wall time of this process, start and checkpoints included.",
    "tokens_per_s": "Median over the steps.",
    "mfu": "Median over the steps of model FLOPs per second, as a fraction of the device's peak; "
    "null on a CPU.",
    "hfu": "The same of executed FLOPs.",
    "loss_steps": "Steps that the first and the last loss are means of.",
    "loss_first": "Mean loss of the first steps.",
    "loss_last": "Mean loss of the last steps.",
    "device_peak_bytes": "Most device memory of a rank in any step.",
    "host_peak_bytes": "Most host memory of GPUs reserved for copies in any step, of all ranks.",
    "offloaded_bytes_per_step": "Median over the steps of what was sent to another tier.",
    "exposed_copy_s": "Median over the steps of the time that compute waited for copies.",
    "step_s": "Median step time, predicted and measured.",
    "prediction_error": "How far predictions of steps of samples were off; null where none was "
    "corrected by earlier steps.",
    "prediction_error.steps": "Steps that were corrected.",
    "prediction_error.corrected": "Median over these of the absolute error, as a fraction of the "
    "measured time.",
    "prediction_error.uncorrected": "The same without correction.",
    "phases_s": "Median time of forward, backward, and data and update, predicted and measured.",
    "memory_bytes": "Peak of every memory bucket, predicted and measured; `all` is the process, or "
    "the device, beyond what it held before the run.",
    "predicted_for": "Machine that the prediction was made for, and whether its figures are "
    "measured or analytic.",
    "attention": "Attention back ends, see docs/kernels.md.",
    "attention.planned": "The one that the plan was priced with.",
    "attention.used": "Those that computed the run.",
    "interrupted_by": "Signal that ended the run early; null if none did.",
    "copies": "Copies of a step; null where the plan offloads nothing.",
    "copies.out_bytes": "Bytes sent by tensor class in the last step, on this rank.",
    "copies.back_bytes": "Bytes that came back by tensor class in the last step.",
    "copies.out_bytes_per_s": "Rate of copies out, predicted and median over the steps.",
    "copies.back_bytes_per_s": "Rate of copies back, predicted and median over the steps.",
    "copies.exposed_s": "Time that compute waited for copies, predicted and median over the steps.",
    "copies.host_bytes": "Host memory for copies, predicted and reserved; 0 on a CPU.",
    "copies.disk_bytes": "File of a disk tier, predicted and its size.",
    "program_digest": "Of the actions that the ranks executed in the last step; that of "
    "`plan.json` where steps are alike.",
    "timeline": "The last step of a pipeline's ranks, as planned and as executed.",
    "timeline.pipeline_ranks": "Pipeline ranks.",
    "timeline.makespan_s": "From the first action to the end of the last one; the "
    "prediction includes the update.",
    "timeline.with_measured_compute_s": "The step simulated with the measured times of its compute "
    "actions; the measured step differs from it by the time between these actions.",
    "timeline.bubble_fraction": "Share of all ranks' time between actions; predicted, also waits "
    "for copies.",
    "timeline.idle_fraction": "Idle share of all ranks, waits for copies included.",
    "timeline.exposed_copy_s_by_rank": "Time that each rank waited for copies.",
}
"""Meanings of the keys of ``run_summary.json``; nested keys are separated by a point. The keys
``program_digest`` and ``timeline`` exist only if the process ran a step."""

_MOST_ENDS = 5  # steps averaged for the first and for the last loss, unless these would overlap


def run_summary(
    steps: Sequence[StepMetrics],
    *,
    name: str,
    wall_s: float,
    memory_bytes: Mapping[str, Pair],
    phases_s: Mapping[str, Pair],
) -> dict[str, Any]:
    """Return the summary of a whole run, as written to ``run_summary.json``.

    Args:
        steps: Metrics of all steps of the run, those before a resumption included; may be empty.
        name: Name of the run.
        wall_s: Wall time of this process, start and checkpoints included.
        memory_bytes: (predicted, measured) peak by bucket, e.g. ``activations``.
        phases_s: (predicted, measured) time of one step by phase, e.g. ``forward``.

    Returns:
        JSON-able figures by key, None if unknown. Rates are medians over the steps; ``loss_first``
        and ``loss_last`` are means of ``loss_steps`` steps each.
    """
    losses = [m.loss for m in steps if math.isfinite(m.loss)]
    ends = max(1, min(_MOST_ENDS, len(losses) // 2))
    step_s = (_median(m.predicted_step_s for m in steps), _median(m.step_s for m in steps))
    return {
        "name": name,
        "steps": len(steps),
        "skipped_steps": sum(m.skipped for m in steps),
        "tokens": sum(m.tokens for m in steps),
        "wall_s": wall_s,
        "tokens_per_s": _median(m.tokens_per_s for m in steps),
        "mfu": _median(m.mfu for m in steps),
        "hfu": _median(m.hfu for m in steps),
        "loss_steps": ends,
        "loss_first": statistics.fmean(losses[:ends]) if losses else None,
        "loss_last": statistics.fmean(losses[-ends:]) if losses else None,
        "device_peak_bytes": _largest(m.device_peak_bytes for m in steps),
        "host_peak_bytes": _largest(m.host_peak_bytes for m in steps),
        "offloaded_bytes_per_step": _median(m.offloaded_bytes for m in steps),
        "exposed_copy_s": _median(m.exposed_copy_s for m in steps),
        "step_s": _labelled(step_s),
        "prediction_error": _prediction_error(steps),
        "phases_s": {phase: _labelled(pair) for phase, pair in phases_s.items()},
        "memory_bytes": {bucket: _labelled(pair) for bucket, pair in memory_bytes.items()},
    }


def _prediction_error(steps: Sequence[StepMetrics]) -> dict[str, Any] | None:
    """Return the median errors of predicted step times, with and without correction.

    Errors are absolute, relative to the measured time, over the steps whose predictions were
    corrected by earlier steps. Returns None if there are no such steps.
    """
    corrected = [m for m in steps if m.correction_steps]
    if not corrected:
        return None
    return {
        "steps": len(corrected),
        "corrected": _median(_error(m.predicted_step_s, m.step_s) for m in corrected),
        "uncorrected": _median(_error(m.uncorrected_step_s, m.step_s) for m in corrected),
    }


def _error(predicted_s: float | None, measured_s: float) -> float:
    """Return the absolute error of a predicted time, relative to the measured; NaN if unknown."""
    return math.nan if predicted_s is None else abs(predicted_s / measured_s - 1)


def write_summary(summary: Mapping[str, Any], path: Path) -> None:
    """Write ``summary`` to ``path`` atomically.

    Raises:
        OSError: The disk is full, or failed.
    """
    write_json(path, summary)


def print_summary(summary: Mapping[str, Any], *, console: Console | None = None) -> None:
    """Print ``summary`` as two tables: results, and predicted against measured figures."""
    from rich.console import Console

    console = console or Console()
    console.print(_reached(summary))
    rows = list(_comparisons(summary))
    if rows:
        console.print(_compared(rows, predicted_for=summary.get("predicted_for")))
    if (timeline := summary.get("timeline")) is not None:
        print_line(_between_compute(timeline), console)


def _reached(summary: Mapping[str, Any]) -> Table:
    from rich.text import Text

    table = _table(title=Text(f"Run {summary['name']}", style="bold"))
    table.add_column()
    table.add_column(justify="right")
    table.show_header = False
    for label, text in _facts(summary):
        table.add_row(label, text)
    return table


def _facts(summary: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    skipped = summary["skipped_steps"]
    yield "steps", f"{summary['steps']}" + (f" ({skipped} skipped)" if skipped else "")
    yield "tokens", format_count(summary["tokens"])
    yield "wall time", format_duration(summary["wall_s"])
    first, last = summary["loss_first"], summary["loss_last"]
    if last is not None:
        ends = summary["loss_steps"]
        which = f"{ends} steps" if ends > 1 else "step"
        yield f"loss, first and last {which}", f"{first:.3f} → {last:.3f}"
    formats = {
        "tokens_per_s": ("tokens/s (median)", format_count),
        "mfu": ("MFU (median)", _percent),
        "hfu": ("HFU (median)", _percent),
        "device_peak_bytes": ("device memory, peak", format_bytes),
        "host_peak_bytes": ("host memory, peak", format_bytes),
    }
    for key, (label, show) in formats.items():
        nothing = key == "host_peak_bytes" and summary[key] == 0  # a CPU has no host beside it
        if summary[key] is not None and not nothing:
            yield label, show(summary[key])
    error = summary.get("prediction_error")
    if error is not None and error["corrected"] is not None:
        before = _percent(error["uncorrected"])
        of = f"{counted(error['steps'], 'step')}, {before} before correction"
        yield "error of predicted steps (median)", f"{_percent(error['corrected'])} ({of})"
    if summary["offloaded_bytes_per_step"]:
        yield "offloaded per step", format_bytes(int(summary["offloaded_bytes_per_step"]))


def _compared(rows: Iterable[tuple[str, str, str, str]], *, predicted_for: str | None) -> Table:
    machine = f", predicted for {predicted_for}" if predicted_for else ""
    table = _table(title=f"Predicted against measured{machine}")
    table.add_column()
    for heading in ("predicted", "measured", "measured / predicted"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _comparisons(summary: Mapping[str, Any]) -> Iterable[tuple[str, str, str, str]]:
    times = {"step": summary["step_s"]} | summary["phases_s"]
    copies = summary.get("copies")
    if copies is not None:
        times["waiting for copies"] = copies["exposed_s"]
    timeline = summary.get("timeline")
    if timeline is not None:
        times["actions of the last step"] = timeline["makespan_s"]
    for name, pair in times.items():
        if pair["measured"] is not None or pair["predicted"] is not None:
            yield _row(f"{name} time", pair, show=format_duration)
    if timeline is not None and timeline["pipeline_ranks"] > 1:
        yield _row("idle share of a pipeline rank", timeline["bubble_fraction"], show=_percent)
    if copies is not None:
        for name, key in (("copies out", "out_bytes_per_s"), ("copies back", "back_bytes_per_s")):
            yield _row(f"{name} rate", copies[key], show=_rate)
        yield _row("disk file", copies["disk_bytes"], show=format_bytes)
    for name, pair in summary["memory_bytes"].items():
        yield _row(f"{name} memory", pair, show=format_bytes)


def _between_compute(timeline: Mapping[str, Any]) -> str:
    """Return a sentence about the time of the last step between its compute actions."""
    simulated_s, measured_s = (
        timeline["with_measured_compute_s"],
        timeline["makespan_s"]["measured"],
    )
    return (
        f"The last step took {format_duration(measured_s)}. Simulated with the measured times of "
        f"its compute it takes {format_duration(simulated_s)}: the other "
        f"{format_duration(max(0.0, measured_s - simulated_s))} passed between compute actions."
    )


def _row(name: str, pair: Mapping[str, Any], *, show: Any) -> tuple[str, str, str, str]:
    predicted, measured = pair["predicted"], pair["measured"]
    known = predicted is not None and measured is not None and predicted > 0
    return (
        name.replace("_", " "),
        "–" if predicted is None else show(predicted),
        "–" if measured is None else show(measured),
        f"{measured / predicted:.2f}" if known else "–",
    )


def _table(*, title: Any) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def _labelled(pair: Pair) -> dict[str, float | None]:
    predicted, measured = pair
    return {"predicted": finite_or_none(predicted), "measured": finite_or_none(measured)}


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(int(bytes_per_s))}/s"


def _percent(fraction: float) -> str:
    return f"{fraction:.1%}"


def _median(values: Iterable[float | None]) -> float | None:
    known = _finite(values)
    return statistics.median(known) if known else None


def _largest(values: Iterable[float | None]) -> float | None:
    return max(_finite(values), default=None)


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]
