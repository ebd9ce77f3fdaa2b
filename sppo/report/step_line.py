"""Line that a run prints after every step."""

from __future__ import annotations

import math

from sppo.report.metrics import StepMetrics
from sppo.units import GIB, format_bytes, format_count, format_duration

_LEFT_OUT = (
    "memory",
    "offloaded",
    "bubble",
    "samples",
    "mfu",
    "plan",
    "lr",
    "norm",
    "eta",
    "speed",
)
"""Fields in the order in which they are left out of lines that are too long."""

_ETA_COLUMNS = len(" | eta 59m59s")


def step_line(
    metrics: StepMetrics,
    *,
    total_steps: int,
    memory_capacity_bytes: int | None,
    eta_s: float | None,
    width: int | None = None,
) -> str:
    """Return the line of a step: progress, loss, gradient norm, speed, memory and remaining time.

    Unknown figures are left out.

    Args:
        metrics: Metrics of the step.
        total_steps: Number of steps of the run.
        memory_capacity_bytes: Device memory that a rank may use in total; None if unknown.
        eta_s: Predicted seconds until the end of the run; None if unknown.
        width: Columns of the terminal, for which fields are left out; None to write all.

    Example:
        ``step 12/500 | loss 2.431 | grad norm 0.70 | lr 3.0e-4 | 41.2k tok/s | mfu 47.1% |
        mem 1.31 of 22.9 GiB | step 25.4 s | plan 24.6 s | eta 3h26m``
    """
    planned_s = metrics.predicted_step_s
    fields = {
        "step": f"step {metrics.step}/{total_steps}",
        "loss": _loss(metrics),
        "norm": f"grad norm {_norm(metrics.grad_norm)}",
        "lr": f"lr {metrics.lr:.1e}".replace("e-0", "e-"),
        "speed": f"{format_count(metrics.tokens_per_s)} tok/s",
        "samples": _samples(metrics),
        "bubble": _bubble(metrics),
        "mfu": "" if metrics.mfu is None else f"mfu {metrics.mfu:.1%}",
        "memory": _memory(metrics.device_peak_bytes, memory_capacity_bytes),
        "offloaded": _offloaded(metrics),
        "time": f"step {_short(metrics.step_s)}",
        "plan": "" if planned_s is None else f"plan {_short(planned_s)}",
        "eta": "" if eta_s is None else f"eta {_short(eta_s)}",
    }
    line = " | ".join(filter(None, fields.values()))
    if width is not None and eta_s is None:
        width -= _ETA_COLUMNS  # the last line looks like those above it
    for name in _LEFT_OUT:
        if width is None or len(line) <= width:
            break
        del fields[name]
        line = " | ".join(filter(None, fields.values()))
    return line


def _norm(norm: float) -> str:
    return f"{norm:.1e}" if 0 < norm < 0.01 or 1e4 <= norm < math.inf else _three_digits(norm)


def _samples(metrics: StepMetrics) -> str:
    """Return the number of samples, and how they are packed.

    Example:
        ``512 samples, 1.2M tokens in 7 split + 91 batched + 4 hybrid, 96 padding``
    """
    if metrics.samples is None:
        return ""
    kinds = {
        "split": metrics.split_subsequences,
        "batched": metrics.batched_subsequences,
        "hybrid": metrics.hybrid_subsequences,
    }
    counts = " + ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    padding = f", {metrics.padding_tokens} padding" if metrics.padding_tokens else ""
    tokens = f"{metrics.samples} samples, {format_count(metrics.tokens)} tokens"
    return f"{tokens} in {counts}{padding}"


def _bubble(metrics: StepMetrics) -> str:
    """Return the idle share of pipeline ranks, such as ``bubble 8.1% (plan 7.5%)``."""
    if metrics.bubble_fraction is None or metrics.planned_bubble_fraction is None:
        return ""
    return f"bubble {metrics.bubble_fraction:.1%} (plan {metrics.planned_bubble_fraction:.1%})"


def _offloaded(metrics: StepMetrics) -> str:
    if not metrics.offloaded_bytes:
        return ""
    waited = f"waited {format_duration(metrics.exposed_copy_s)}"
    return f"offloaded {format_bytes(metrics.offloaded_bytes)} ({waited})"


def _loss(metrics: StepMetrics) -> str:
    if metrics.labels == 0:
        return "loss none (no label counts: update skipped)"
    skipped = " (not finite: update skipped)" if metrics.skipped else ""
    return f"loss {metrics.loss:.3f}{skipped}"


def _memory(peak_bytes: int | None, capacity_bytes: int | None) -> str:
    if peak_bytes is None:
        return ""
    of = "" if capacity_bytes is None else f" of {_three_digits(capacity_bytes / GIB)}"
    return f"mem {_three_digits(peak_bytes / GIB)}{of} GiB"


def _short(seconds: float) -> str:
    # Below a second and from a minute on, format_duration has three digits already.
    return f"{_three_digits(seconds)} s" if 1 <= seconds < 59.95 else format_duration(seconds)


def _three_digits(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"
