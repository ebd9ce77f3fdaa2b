"""Tables of the summary of a run: results, and predicted against measured figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sppo.report.lines import print_line
from sppo.report.run_summary import Pair, RunSummary, TimelineSummary
from sppo.units import counted, format_bytes, format_count, format_duration


def print_summary(summary: RunSummary, *, console: Console) -> None:
    """Print a summary as two tables: results, and predicted against measured figures."""
    reached = _table(title=Text(f"Run {summary.name}", style="bold"))
    reached.add_column()
    reached.add_column(justify="right")
    reached.show_header = False
    for label, text in _facts(summary):
        reached.add_row(label, text)
    console.print(reached)
    rows = list(_comparisons(summary))
    if rows:
        console.print(_compared(rows, predicted_for=summary.predicted_for))
    if summary.timeline is not None:
        print_line(_between_compute(summary.timeline), console)


def _facts(summary: RunSummary) -> Iterator[tuple[str, str]]:
    """Yield the name and the value, as text, of each result that is known."""
    skipped = f" ({summary.skipped_steps} skipped)" if summary.skipped_steps else ""
    yield "steps", f"{summary.steps}{skipped}"
    yield "tokens", format_count(summary.tokens)
    yield "wall time", format_duration(summary.wall_s)
    if summary.loss_last is not None:
        which = f"{summary.loss_steps} steps" if summary.loss_steps > 1 else "step"
        ends = f"{summary.loss_first:.3f} → {summary.loss_last:.3f}"
        yield f"loss, first and last {which}", ends
    host_bytes = summary.host_peak_bytes or None  # a CPU has no host beside it
    known: tuple[tuple[str, Any, Callable[[Any], str]], ...] = (
        ("tokens/s (median)", summary.tokens_per_s, format_count),
        ("MFU (median)", summary.mfu, _percent),
        ("HFU (median)", summary.hfu, _percent),
        ("device memory, peak", summary.device_peak_bytes, format_bytes),
        ("host memory, peak", host_bytes, format_bytes),
    )
    for label, value, show in known:
        if value is not None:
            yield label, show(value)
    error = summary.prediction_error
    if error is not None and error.corrected is not None and error.uncorrected is not None:
        of = f"{counted(error.steps, 'step')}, {_percent(error.uncorrected)} before correction"
        yield "error of predicted steps (median)", f"{_percent(error.corrected)} ({of})"
    if summary.offloaded_bytes_per_step:
        yield "offloaded per step", format_bytes(int(summary.offloaded_bytes_per_step))


def _compared(rows: Iterable[tuple[str, str, str, str]], *, predicted_for: str | None) -> Table:
    machine = f", predicted for {predicted_for}" if predicted_for else ""
    table = _table(title=f"Predicted against measured{machine}")
    table.add_column()
    for heading in ("predicted", "measured", "measured / predicted"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _comparisons(summary: RunSummary) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows of the table of predicted against measured figures."""
    copies, timeline = summary.copies, summary.timeline
    times = {"step": summary.step_s, **summary.phases_s}
    if copies is not None:
        times["waiting for copies"] = copies.exposed_s
    if timeline is not None:
        times["actions of the last step"] = timeline.makespan_s
    for name, pair in times.items():
        if pair != Pair(None, None):
            yield _row(f"{name} time", pair, show=format_duration)
    if timeline is not None and timeline.pipeline_ranks > 1:
        yield _row("idle share of a pipeline rank", timeline.bubble_fraction, show=_percent)
    if copies is not None:
        yield _row("copies out rate", copies.out_bytes_per_s, show=_rate)
        yield _row("copies back rate", copies.back_bytes_per_s, show=_rate)
        yield _row("disk file", copies.disk_bytes, show=format_bytes)
    for name, pair in summary.memory_bytes.items():
        yield _row(f"{name} memory", pair, show=format_bytes)


def _between_compute(timeline: TimelineSummary) -> str:
    """Return a sentence about the time of the last step between its compute actions."""
    simulated_s, measured_s = timeline.with_measured_compute_s, timeline.makespan_s.measured
    assert simulated_s is not None, "known with the timeline"
    assert measured_s is not None, "known with the timeline"
    return (
        f"The last step took {format_duration(measured_s)}. Simulated with the measured times of "
        f"its compute it takes {format_duration(simulated_s)}: the other "
        f"{format_duration(max(0.0, measured_s - simulated_s))} passed between compute actions."
    )


def _row(name: str, pair: Pair, *, show: Callable[[Any], str]) -> tuple[str, str, str, str]:
    predicted, measured = pair.predicted, pair.measured
    known = predicted is not None and measured is not None and predicted > 0
    return (
        name.replace("_", " "),
        "–" if predicted is None else show(predicted),
        "–" if measured is None else show(measured),
        f"{measured / predicted:.2f}" if known else "–",  # type: ignore[operator]  # both known
    )


def _table(*, title: str | Text) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(int(bytes_per_s))}/s"


def _percent(fraction: float) -> str:
    return f"{fraction:.1%}"
