"""Tables of what others measured, and of what is planned or priced beside it."""

from __future__ import annotations

from experiments.reports import markdown, report
from sppo.units import format_bytes, format_tokens

_PUBLISHED_AS = {"FSDP2 + context parallel": "Ulysses", "UPipe": "UPipe", "FPDT": "FPDT"}
"""Name under which others measured a baseline method."""
_WHOLE_LAYERS = "activations.policy=recompute"
"""Changes that turn a request into its baseline in the SPPO paper."""


def peers() -> str:
    """Return tokens per second and device of one node: others measured, SPPO planned."""
    rows = []
    for row in report("planned_peers")["rows"]:
        plan, own_rates = row["plans"]["published"], row["plans"]["measured"]
        rows.append(
            (
                row["tokens"],
                f"{row['measured'][row['best']]} ({row['best']})",
                f"{plan['tokens_per_s']:.0f}",
                f"{own_rates['tokens_per_s']:.0f}",
                format_bytes(plan["node_host_peak_bytes"]),
                "" if row["ulysses_priced"] is None else _error(row["ulysses_priced"]),
            )
        )
    headings = (
        "tokens",
        "others, *measured*",
        "SPPO, *simulated*",
        "with rates of our H100",
        "host memory a node",
        "our cost model on their Ulysses steps",
    )
    return markdown(headings, rows)


def _error(predicted_over_measured: float) -> str:
    """Return by how much a prediction is too fast or too slow."""
    error = round(100 * (predicted_over_measured - 1))
    return f"{abs(error)} % too {'slow' if error > 0 else 'fast'}"


def measured_by_others() -> str:
    """Return tokens per second and device that others measured, by method and length."""
    others = report("planned_peers")["others"]
    rows = [
        (name, *(str(rate) if rate else "" for rate in rates))
        for name, rates in others["tokens_per_s"].items()
    ]
    return markdown(("", *others["lengths"]), rows)


def methods() -> str:
    """Return longest sequences and steps of 1Mi tokens, measured and priced, of what fits that."""
    peers_report = report("planned_peers")
    others, rows = peers_report["others"], []
    plans = {row["tokens"]: row["plans"]["published"] for row in peers_report["rows"]}
    for one in peers_report["methods"]:
        name = one["method"]
        speed, host = one["tokens_per_s_per_gpu"], one["node_host_bytes"]
        if name == "SPPO":
            speed, host = plans["1Mi"]["tokens_per_s"], plans["1Mi"]["node_host_peak_bytes"]
        if speed is None:
            continue
        published = others["tokens_per_s"].get(_PUBLISHED_AS.get(name), ())
        rates = dict(zip(others["lengths"], published, strict=False))
        longest = [length for length, rate in rates.items() if rate]
        rows.append(
            (
                name,
                longest[-1] if longest else others["longest_of_others"].get(name, ""),
                format_tokens(one["longest_tokens"]),
                str(rates.get("1Mi", "")),
                f"{speed:.0f}",
                format_bytes(host),
            )
        )
    headings = (
        "",
        "longest that fitted, *measured*",
        "longest that fits, *simulated*",
        "tokens/s a GPU at 1Mi, *measured*",
        "tokens/s a GPU at 1Mi, *simulated*",
        "host memory a node, *simulated*",
    )
    return markdown(headings, rows)


def paper() -> str:
    """Return what the solver plans where the SPPO paper reports figures."""
    rows = report("planned_looped")["rows"]
    by_layers = next(row for row in rows if row["baseline_changes"][:1] == [_WHOLE_LAYERS])
    longest = next(row for row in rows if row["target"].startswith("GPT-7B, 4Mi tokens"))["found"]
    return (
        "For GPT-13B at 512Ki tokens on 64 A100-80GB a planned step is "
        f"{by_layers['ratio']:.2f} times as fast as one that recomputes whole layers, in the paper "
        "1.44 times. GPT-7B at 4Mi tokens fits on 128, as there, with "
        f"{format_bytes(longest['node_host_peak_bytes'])} of host memory a node. (*Simulated*.)"
    )


def ours_and_published() -> str:
    """Return steps and memory that others measured beside those of the cost model."""
    rows = []
    for row in report("compare_published")["configurations"]:
        memory, ratio = row["measured_bytes"], row["memory_ratio"]
        rows.append(
            (
                row["name"],
                f"{row['measured_s']:.4g}",
                f"{row['predicted_s']:.4g}",
                f"{row['time_ratio']:.2f}",
                "" if memory is None else f"{memory / 2**30:.1f}",
                f"{row['predicted_bytes'] / 2**30:.1f}",
                "" if ratio is None else f"{ratio:.2f}",
            )
        )
    headings = "", "step, s", "predicted", "ratio", "memory, GiB", "predicted", "ratio"
    return markdown(headings, rows)
