"""Table of what was measured, for the first screen of the README."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sppo.units import format_bytes, format_duration

Report = Mapping[str, Any]
Row = tuple[str, str, str, str]
HEADINGS = ("*measured*", "step", "memory", "beside it")
_GPU_MODEL = "Llama-3.2-1B"


def rows(*, gpu_128k: Report, gpu_32k: Report, cpu: Report) -> Iterator[Row]:
    """Yield what was measured on an H100 and on a CPU.

    Args:
        gpu_128k: Report of 128Ki tokens, with predictions.
        gpu_32k: Report of 32Ki tokens, with transformers on the same GPU.
        cpu: Report of growing lengths, with transformers on the same CPU.
    """
    (long,) = (c["runs"] for c in gpu_128k["training"]["cases"])
    run, memory = long["hybrid"], long["hybrid"]["memory_bytes"]["all"]
    yield (
        f"one H100, {_GPU_MODEL}, 128Ki tokens",
        format_duration(run["step_s"]),
        format_bytes(memory["measured"]),
        f"predicted: {_figures(run['predicted_step_s'], memory['predicted'])}",
    )
    short, (other,) = gpu_32k["training"]["times"][0], gpu_32k["training"]["transformers"]
    yield (
        f"one H100, {_GPU_MODEL}, 32Ki tokens, all activations offloaded",
        format_duration(short["step_s"]["offload_all"]),
        format_bytes(short["device_peak_bytes"]["offload_all"]),
        f"transformers, checkpointing: {_figures(other['step_s'], other['device_peak_bytes'])}",
    )
    ours, theirs = (m for m in cpu["measurements"] if m["length_tokens"] == 32 * 1024)
    yield (
        "two CPU cores, 6 layers of width 512, 32Ki tokens",
        format_duration(ours["step_s"]),
        format_bytes(ours["peak_bytes"]),
        f"transformers, checkpointing: {_figures(theirs['step_s'], theirs['peak_bytes'])}",
    )


def _figures(seconds: float, count: float) -> str:
    return f"{format_duration(seconds)}, {format_bytes(count)}"


def lead(peers: Report) -> str:
    """Return by how much SPPO leads if both sides are priced by the same cost model.

    Args:
        peers: Report of lengths that others measured, with the plans for each.
    """
    priced = [row for row in peers["rows"] if row["ulysses_priced"] is not None]
    leads = [
        row["plans"]["published"]["tokens_per_s"]
        / row["measured"]["Ulysses"]
        * row["ulysses_priced"]
        for row in priced
    ]
    no_faster = [row["tokens"] for row in peers["rows"] if not _leads_with_our_rates(row)]
    return (
        "Their runs are measured and ours simulated, so do not divide the columns: with both sides "
        f"simulated, SPPO is {min(leads):.2f} to {max(leads):.2f} times as fast as their Ulysses "
        f"from {priced[0]['tokens']} to {priced[-1]['tokens']} tokens. With the rates of our H100 "
        f"it is no faster than the best of others at {' and '.join(no_faster)}."
    )


def _leads_with_our_rates(row: Mapping[str, Any]) -> bool:
    """Return whether a plan with the rates of our H100 is faster than others by what is shown."""
    best = row["measured"][row["best"]]
    return bool(round(row["plans"]["measured"]["tokens_per_s"]) > best)


def larger(models: Report) -> str:
    """Return what larger models take at 1Mi tokens, for a reader who decides on a machine.

    Args:
        models: Report of models of today, planned on one node and on eight.
    """
    planned = {(row["model"], row["devices"]): row for row in models["rows"] if _is_1mi(row)}
    small, large = "gemma-3-27b", "qwen3-235b-a22b"
    one, many, only = (planned[key] for key in ((small, 8), (small, 64), (large, 64)))
    assert not planned[large, 8]["feasible"], "the text says that it needs more"
    return (
        f"Larger models at 1Mi tokens, *simulated*: {small} takes "
        f"{format_duration(one['step_s'])} a step on 8 H100 and {format_duration(many['step_s'])} "
        f"on 64; {large} does not fit on 8, and takes {format_duration(only['step_s'])} on 64 "
        "([13 models](docs/results/models.md))."
    )


def _is_1mi(row: Mapping[str, Any]) -> bool:
    return bool(row["tokens"] == "1Mi")
