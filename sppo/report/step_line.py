"""Line that a run prints after every step."""

from __future__ import annotations

from sppo.report.metrics import StepMetrics
from sppo.units import GIB, format_bytes, format_count, format_duration


def step_line(
    metrics: StepMetrics,
    *,
    total_steps: int,
    memory_capacity_bytes: int | None,
    eta_s: float | None,
) -> str:
    """Return the line of a step: progress, loss, speed, memory and remaining time.

    Unknown figures are left out.

    Example:
        ``step 12/500 | loss 2.431 | 41.2k tok/s | mfu 47.1% | mem 1.31 of 22.9 GiB |
        step 25.4 s (plan 24.6 s) | eta 3h26m``
    """
    parts = [
        f"step {metrics.step}/{total_steps}",
        _loss(metrics),
        f"{format_count(metrics.tokens_per_s)} tok/s",
    ]
    if metrics.samples is not None:
        parts.append(_samples(metrics))
    if metrics.mfu is not None:
        parts.append(f"mfu {metrics.mfu:.1%}")
    if metrics.device_peak_bytes is not None:
        parts.append(f"mem {_memory(metrics.device_peak_bytes, memory_capacity_bytes)}")
    if metrics.offloaded_bytes:
        offloaded = format_bytes(metrics.offloaded_bytes)
        parts.append(f"offloaded {offloaded} (waited {format_duration(metrics.exposed_copy_s)})")
    parts.append(_duration(metrics.step_s, predicted_s=metrics.predicted_step_s))
    if eta_s is not None:
        parts.append(f"eta {_short(eta_s)}")
    return " | ".join(parts)


def _samples(metrics: StepMetrics) -> str:
    """Return the number of samples, how they are packed, and the idle share of pipeline ranks.

    Example:
        ``512 samples, 1.2M tokens in 7 split + 91 batched + 4 hybrid | bubble 8.1% (plan 7.5%)``
    """
    kinds = {
        "split": metrics.split_subsequences,
        "batched": metrics.batched_subsequences,
        "hybrid": metrics.hybrid_subsequences,
    }
    counts = " + ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    text = f"{metrics.samples} samples, {format_count(metrics.tokens)} tokens in {counts}"
    if metrics.padding_tokens:
        text += f", {metrics.padding_tokens} padding"
    if metrics.bubble_fraction is not None and metrics.planned_bubble_fraction is not None:
        planned = f"(plan {metrics.planned_bubble_fraction:.1%})"
        text += f" | bubble {metrics.bubble_fraction:.1%} {planned}"
    return text


def _loss(metrics: StepMetrics) -> str:
    if metrics.labels == 0:
        return "loss none (no label counts: update skipped)"
    skipped = " (not finite: update skipped)" if metrics.skipped else ""
    return f"loss {metrics.loss:.3f}{skipped}"


def _memory(peak_bytes: int, capacity_bytes: int | None) -> str:
    of = "" if capacity_bytes is None else f" of {_three_digits(capacity_bytes / GIB)}"
    return f"{_three_digits(peak_bytes / GIB)}{of} GiB"


def _duration(step_s: float, *, predicted_s: float | None) -> str:
    plan = "" if predicted_s is None else f" (plan {_short(predicted_s)})"
    return f"step {_short(step_s)}{plan}"


def _short(seconds: float) -> str:
    # Below a second and from a minute on, format_duration has three digits already.
    return f"{_three_digits(seconds)} s" if 1 <= seconds < 59.95 else format_duration(seconds)


def _three_digits(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"
