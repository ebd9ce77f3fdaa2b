"""Line that a run prints after every step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sppo.report.metrics import StepMetrics
from sppo.units import GIB, format_bytes, format_count, format_duration

_SHORTENED = ("step", "memory", "samples", "offloaded", "bubble", "time", "norm", "loss")
"""Fields in the order in which they take a shorter form, until a line fits. The bar below the lines
has the number of steps, too."""
_LEFT_OUT = ("memory", "offloaded", "bubble", "samples", "mfu", "plan", "eta", "speed", "lr")
"""Fields in the order in which they are left out of lines that are too long in short forms."""

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
        width: Columns of the terminal, to which fields are shortened; None to write out all.

    Example:
        ``step 12/500 | loss 2.431 | grad norm 0.70 | lr 3.0e-4 | 41.2k tok/s | mfu 47.1% |
        mem 1.31 of 22.9 GiB | step 25.4 s | plan 24.6 s | eta 3h26m``, and in 80 columns
        ``step 12 | loss 2.431 | norm 0.70 | lr 3.0e-4 | 41.2k tok/s | 25.4 s | eta 3h26m``
    """
    planned_s = metrics.predicted_step_s
    forms: dict[str, Sequence[str]] = {
        "step": (f"step {metrics.step}/{total_steps}", f"step {metrics.step}"),
        "loss": _loss(metrics),
        "norm": [f"{name} {_norm(metrics.grad_norm)}" for name in ("grad norm", "norm")],
        "lr": [f"lr {metrics.lr:.1e}".replace("e-0", "e-")],
        "speed": [f"{format_count(metrics.tokens_per_s)} tok/s"],
        "samples": _samples(metrics),
        "bubble": _bubble(metrics),
        "mfu": [] if metrics.mfu is None else [f"mfu {metrics.mfu:.1%}"],
        "memory": _memory(metrics.device_peak_bytes, memory_capacity_bytes),
        "offloaded": _offloaded(metrics),
        "time": [f"step {_short(metrics.step_s)}", _short(metrics.step_s)],
        "plan": [] if planned_s is None else [f"plan {_short(planned_s)}"],
        "eta": [] if eta_s is None else [f"eta {_short(eta_s)}"],
    }
    line = _joined(forms)
    if width is not None and eta_s is None:
        width -= _ETA_COLUMNS  # the last line looks like those above it
    for name, kept in (
        *((name, slice(-1, None)) for name in _SHORTENED),
        *((name, slice(0)) for name in _LEFT_OUT),
    ):
        if width is None or len(line) <= width:
            break
        forms[name] = forms[name][kept]
        line = _joined(forms)
    return line


def _joined(forms: Mapping[str, Sequence[str]]) -> str:
    """Return the first form of each field that has one left."""
    return " | ".join(texts[0] for texts in forms.values() if texts)


def _norm(norm: float) -> str:
    return f"{norm:.1e}" if 0 < norm < 0.01 or 1e4 <= norm < math.inf else _three_digits(norm)


def _samples(metrics: StepMetrics) -> list[str]:
    """Return the number of samples, and how they are packed.

    Example:
        ``512 samples, 1.2M tokens in 7 split + 91 batched + 4 hybrid, 96 padding``
    """
    if metrics.samples is None:
        return []
    kinds = {
        "split": metrics.split_subsequences,
        "batched": metrics.batched_subsequences,
        "hybrid": metrics.hybrid_subsequences,
    }
    counts = " + ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    short = f"{metrics.samples} samples"
    tokens = f"{short}, {format_count(metrics.tokens)} tokens"
    padding = f", {metrics.padding_tokens} padding" if metrics.padding_tokens else ""
    return [f"{tokens} in {counts}{padding}", short]


def _bubble(metrics: StepMetrics) -> list[str]:
    """Return the idle share of pipeline ranks, such as ``bubble 8.1% (plan 7.5%)``."""
    if metrics.bubble_fraction is None or metrics.planned_bubble_fraction is None:
        return []
    measured = f"bubble {metrics.bubble_fraction:.1%}"
    return [f"{measured} (plan {metrics.planned_bubble_fraction:.1%})", measured]


def _offloaded(metrics: StepMetrics) -> list[str]:
    if not metrics.offloaded_bytes:
        return []
    waited = f"waited {format_duration(metrics.exposed_copy_s)}"
    return [f"offloaded {format_bytes(metrics.offloaded_bytes)} ({waited})", waited]


def _loss(metrics: StepMetrics) -> list[str]:
    if metrics.labels == 0:
        return ["loss none (no label counts: update skipped)", "loss none (skipped)"]
    loss = f"loss {metrics.loss:.3f}"
    if metrics.skipped:
        return [f"{loss} (not finite: update skipped)", f"{loss} (skipped)"]
    return [loss]


def _memory(peak_bytes: int | None, capacity_bytes: int | None) -> list[str]:
    if peak_bytes is None:
        return []
    peak = f"mem {_three_digits(peak_bytes / GIB)}"
    of = [] if capacity_bytes is None else [f"{peak} of {_three_digits(capacity_bytes / GIB)} GiB"]
    return [*of, f"{peak} GiB"]


def _short(seconds: float) -> str:
    # Below a second and from a minute on, format_duration has three digits already.
    return f"{_three_digits(seconds)} s" if 1 <= seconds < 59.95 else format_duration(seconds)


def _three_digits(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"
