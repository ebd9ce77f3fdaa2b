"""Summary of a run: what was reached, and how well predicted; ``run_summary.json`` and tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from sppo.output_file import write_json
from sppo.report.lines import print_line
from sppo.report.metrics import StepMetrics, finite_or_none
from sppo.units import counted, format_bytes, format_count, format_duration

_MOST_ENDS = 5  # steps averaged for the first and for the last loss, unless these would overlap


@dataclass(frozen=True, slots=True)
class Pair:
    """Predicted and measured value of a figure; None if unknown."""

    predicted: int | float | None
    measured: int | float | None


@dataclass(frozen=True, slots=True)
class RankPair:
    """Predicted and measured values of a figure, one for each pipeline rank."""

    predicted: tuple[float, ...]
    measured: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PredictionError:
    """How far predictions of steps of samples were off that earlier steps corrected."""

    steps: int
    """Steps that were corrected."""
    corrected: float | None
    """Median over these of the absolute error, as a fraction of the measured time."""
    uncorrected: float | None
    """The same without correction."""


@dataclass(frozen=True, slots=True)
class AttentionSummary:
    """Attention back ends, see docs/kernels.md."""

    planned: str
    """The one that the plan was priced with."""
    used: tuple[str, ...]
    """Those that computed the run, those that plans are priced for first."""


@dataclass(frozen=True, slots=True)
class CopiesSummary:
    """Copies of a step to another tier and back."""

    out_bytes: Mapping[str, int]
    """Bytes sent by tensor class in the last step, on this rank."""
    back_bytes: Mapping[str, int]
    """Bytes that came back by tensor class in the last step."""
    out_bytes_per_s: Pair
    """Rate of copies out, measured as the median over the steps."""
    back_bytes_per_s: Pair
    """Rate of copies back, measured as the median over the steps."""
    exposed_s: Pair
    """Time that compute waited for copies, measured as the median over the steps."""
    host_bytes: Pair
    """Host memory for copies, predicted and reserved; 0 on a CPU."""
    disk_bytes: Pair
    """File of a disk tier, predicted and its size."""


@dataclass(frozen=True, slots=True)
class TimelineSummary:
    """The last step of a pipeline's ranks, as planned and as executed."""

    idle_fraction: Pair
    """Idle share of all ranks, waits for copies included."""
    exposed_copy_s_by_rank: RankPair
    """Time that each rank waited for copies."""
    pipeline_ranks: int
    """Pipeline ranks."""
    makespan_s: Pair
    """From the first action to the end of the last one; the prediction includes the update."""
    with_measured_compute_s: float | None
    """The step simulated with the measured times of its compute actions; the measured step differs
    from it by the time between these actions."""
    bubble_fraction: Pair
    """Share of all ranks' time between actions; predicted, also waits for copies."""


@dataclass(frozen=True, slots=True)
class ValidationSummary:
    """Validations of a call of training."""

    count: int
    seconds: Pair
    """Median time of a validation, predicted and measured."""
    peak_bytes: Pair
    """Peak memory of the device in a validation, predicted and measured."""
    watched: str
    """Set and measure by which weights are compared, such as `held_out.loss`."""
    best: float | None
    """Best value so far; null if none was a number."""
    best_step: int
    """Step of the best value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Figures of a whole run; None if unknown. Rates are medians over the steps."""

    name: str
    """Name of the output directory."""
    steps: int
    """Steps of the whole run, those before a resumption included."""
    skipped_steps: int
    """Steps whose update was left out."""
    tokens: int
    """Tokens trained in all steps."""
    wall_s: float
    """Wall time of this process, start and checkpoints included."""
    tokens_per_s: float | None
    """Median over the steps."""
    mfu: float | None
    """Median over the steps of model FLOPs per second, as a fraction of the device's peak; null on
    a CPU."""
    hfu: float | None
    """The same of executed FLOPs."""
    loss_steps: int
    """Steps that the first and the last loss are means of."""
    loss_first: float | None
    """Mean loss of the first steps."""
    loss_last: float | None
    """Mean loss of the last steps."""
    device_peak_bytes: int | None
    """Most device memory of a rank in any step."""
    host_peak_bytes: int | None
    """Most host memory of GPUs reserved for copies in any step, of all ranks."""
    offloaded_bytes_per_step: float | None
    """Median over the steps of what was sent to another tier."""
    exposed_copy_s: float | None
    """Median over the steps of the time that compute waited for copies."""
    step_s: Pair
    """Median step time, predicted and measured."""
    prediction_error: PredictionError | None
    """Error of predictions of steps of samples; null where none was corrected by earlier steps."""
    phases_s: Mapping[str, Pair]
    """Median time of forward, backward, and data and update, predicted and measured."""
    memory_bytes: Mapping[str, Pair]
    """Peak of every memory bucket, predicted and measured; `all` is the process, or the device,
    beyond what it held before the run."""
    predicted_for: str | None = None
    """Machine that the prediction was made for, and whether its figures are measured or
    analytic."""
    attention: AttentionSummary | None = None
    """Attention back ends that were planned and used."""
    copies: CopiesSummary | None = None
    """Copies of a step; null where the plan offloads nothing."""
    interrupted_by: str | None = None
    """Signal that ended the run early; null if none did."""
    stopped_early: str | None = None
    """Why the run ended before its last step; left out unless its validations did not improve."""
    validation: ValidationSummary | None = None
    """Validations of the process that ran the last steps; left out if it made none."""
    program_digest: str | None = None
    """Of the actions that the ranks executed in the last step; that of `plan.json` where steps are
    alike. Left out if the process ran no step."""
    timeline: TimelineSummary | None = None
    """The last step as planned and as executed. Left out if the process ran no step."""


def run_summary(
    steps: Sequence[StepMetrics],
    *,
    name: str,
    wall_s: float,
    memory_bytes: Mapping[str, Pair],
    phases_s: Mapping[str, Pair],
    **known: Any,
) -> RunSummary:
    """Return the summary of a run.

    Args:
        steps: Metrics of all steps of the run, those before a resumption included; may be empty.
        name: Name of the run.
        wall_s: Wall time of this process, start and checkpoints included.
        memory_bytes: Peak by bucket, e.g. ``activations``.
        phases_s: Time of one step by phase, e.g. ``forward``.
        known: Fields that only the process knows that ran the last steps.
    """
    losses = _finite(m.loss for m in steps)
    ends = max(1, min(_MOST_ENDS, len(losses) // 2))
    return RunSummary(
        name=name,
        steps=len(steps),
        skipped_steps=sum(m.skipped for m in steps),
        tokens=sum(m.tokens for m in steps),
        wall_s=wall_s,
        tokens_per_s=_median(m.tokens_per_s for m in steps),
        mfu=_median(m.mfu for m in steps),
        hfu=_median(m.hfu for m in steps),
        loss_steps=ends,
        loss_first=statistics.fmean(losses[:ends]) if losses else None,
        loss_last=statistics.fmean(losses[-ends:]) if losses else None,
        device_peak_bytes=_largest(m.device_peak_bytes for m in steps),
        host_peak_bytes=_largest(m.host_peak_bytes for m in steps),
        offloaded_bytes_per_step=_median(m.offloaded_bytes for m in steps),
        exposed_copy_s=_median(m.exposed_copy_s for m in steps),
        step_s=Pair(_median(m.predicted_step_s for m in steps), _median(m.step_s for m in steps)),
        prediction_error=_prediction_error(steps),
        phases_s=_finite_pairs(phases_s),
        memory_bytes=_finite_pairs(memory_bytes),
        **known,
    )


def write_summary(summary: RunSummary, path: Path) -> None:
    """Write a summary atomically, without what only some runs have.

    Raises:
        OSError: The disk is full, or failed.
    """
    found = asdict(summary)
    for key in ("program_digest", "timeline", "stopped_early", "validation"):
        if found[key] is None:
            del found[key]
    write_json(path, found)


def read_summary(path: Path) -> RunSummary:
    """Read a summary that :func:`write_summary` has written.

    Raises:
        OSError: There is no summary.
        ValueError: The file is damaged.
    """
    return TypeAdapter(RunSummary).validate_json(path.read_bytes())


def _prediction_error(steps: Sequence[StepMetrics]) -> PredictionError | None:
    """Return the errors of steps that were corrected by earlier steps; None if there are none."""
    corrected = [m for m in steps if m.correction_steps]
    if not corrected:
        return None
    errors = (
        _median(abs(p / m.step_s - 1) for m in corrected if (p := getattr(m, name)) is not None)
        for name in ("predicted_step_s", "uncorrected_step_s")
    )
    return PredictionError(len(corrected), *errors)


def _finite_pairs(pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """Return pairs with None in place of values that are not finite."""
    return {
        name: Pair(finite_or_none(pair.predicted), finite_or_none(pair.measured))
        for name, pair in pairs.items()
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = _finite(values)
    return statistics.median(known) if known else None


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


# Tables


def print_summary(summary: RunSummary, *, console: Console) -> None:
    """Print a summary as two tables: results, and predicted against measured figures."""
    shape: dict[str, Any] = {"title_justify": "left", "box": box.SIMPLE_HEAD, "pad_edge": False}
    title = Text(f"Run {summary.name}", style="bold")
    reached = Table("", Column(justify="right"), title=title, show_header=False, **shape)
    for fact in _facts(summary):
        reached.add_row(*fact)
    console.print(reached)
    if rows := list(_comparisons(summary)):
        machine = f", predicted for {summary.predicted_for}" if summary.predicted_for else ""
        headings = ("predicted", "measured", "measured / predicted")
        compared = Table(
            "",
            *(Column(heading, justify="right") for heading in headings),
            title=f"Predicted against measured{machine}",
            **shape,
        )
        for row in rows:
            compared.add_row(*row)
        console.print(compared)
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
    found = summary.validation
    if found is not None and found.best is not None:
        yield f"best {found.watched}", f"{found.best:.4g} at step {found.best_step}"
    error = summary.prediction_error
    if error is not None and error.corrected is not None and error.uncorrected is not None:
        of = f"{counted(error.steps, 'step')}, {_percent(error.uncorrected)} before correction"
        yield "error of predicted steps (median)", f"{_percent(error.corrected)} ({of})"
    if summary.offloaded_bytes_per_step:
        yield "offloaded per step", format_bytes(int(summary.offloaded_bytes_per_step))


def _comparisons(summary: RunSummary) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows of the table of predicted against measured figures."""
    copies, timeline = summary.copies, summary.timeline
    times = {"step": summary.step_s, **summary.phases_s}
    if copies is not None:
        times["waiting for copies"] = copies.exposed_s
    if timeline is not None:
        times["actions of the last step"] = timeline.makespan_s
    if summary.validation is not None:
        times["validation"] = summary.validation.seconds
    for name, pair in times.items():
        if pair != Pair(None, None):
            yield _row(f"{name} time", pair, show=format_duration)
    if timeline is not None and timeline.pipeline_ranks > 1:
        yield _row("idle share of a pipeline rank", timeline.bubble_fraction, show=_percent)
    if copies is not None:
        yield _row("copies out rate", copies.out_bytes_per_s, show=_rate)
        yield _row("copies back rate", copies.back_bytes_per_s, show=_rate)
        yield _row("disk file", copies.disk_bytes, show=format_bytes)
    memory = dict(summary.memory_bytes)
    if summary.validation is not None:
        memory["validation"] = summary.validation.peak_bytes
    for name, pair in memory.items():
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


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(int(bytes_per_s))}/s"


def _percent(fraction: float) -> str:
    return f"{fraction:.1%}"
