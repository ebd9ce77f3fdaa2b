"""Plan training of the preset models of today at long contexts: what fits, how, and how fast.

Every cell is what ``sppo solve`` answers on presets, with analytic rates and a simulated step;
nothing is trained. Where nothing fits, weights and gradients are sharded, too (ZeRO-3). The table
is printed in Markdown. That of hybrids has each model again with attention in all layers.

    python -m experiments.models --output docs/results/planned_models.json
    python -m experiments.models --table hybrids --output docs/results/planned_hybrids.json
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from experiments import harness
from sppo.config import load_run
from sppo.cost.trainable import counts_text
from sppo.hardware.run_hardware import run_hardware
from sppo.planning.make_plan import predict
from sppo.planning.search.solver import solve
from sppo.units import format_bytes, parse_size


class Plans(NamedTuple):
    """Plans of a table: every model at every length on every machine."""

    models: tuple[str, ...]
    """Presets, each with further words of the request."""
    lengths: tuple[str, ...]
    machines: tuple[tuple[str, int], ...]
    """Presets of nodes, and numbers of nodes."""


PLAIN = "model.linear_attention=null model.layer_types=null model.family=null"
"""Words of a request for attention in all layers."""
_HYBRIDS = ("qwen3.5-4b", "qwen3.5-9b", "qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3-next-80b-a3b")
TABLES = {
    "models": Plans(
        (
            *("smollm3-3b", "gemma-3-4b", "olmo-3-7b", "ministral-8b", "gemma-3-12b", "phi-4"),
            *("gpt-oss-20b", "gemma-3-27b", "qwen3-30b-a3b", "mixtral-8x7b", "glm-4.5-air"),
            *("gpt-oss-120b", "qwen3-235b-a22b"),
        ),
        ("128Ki", "1Mi"),
        (("h100", 1), ("h100", 8)),
    ),
    "hybrids": Plans(
        tuple(words for name in _HYBRIDS for words in (name, f"{name} {PLAIN}")),
        ("256Ki", "1Mi"),
        (("h200", 1), ("h100", 4)),
    ),
}
_DEVICES_PER_NODE = 8
_RUN = "configs/run/llama_8b_1m_1node.yaml"

Row = dict[str, Any]


def main() -> None:
    """Plan every cell, then print and write the results."""
    parser = harness.parser(__doc__)
    parser.add_argument("--table", choices=[*TABLES], default="models")
    options = parser.parse_args()
    plans, rows = TABLES[options.table], []
    for model, length, (node, nodes) in product(*plans):
        rows.append(row(model, length, node=node, nodes=nodes))
        print(f"planned: {rows[-1]['command']}", flush=True)
    print(markdown(rows))
    about = "Planned, never run: sppo solve on presets of nodes (analytic rates, simulated steps)."
    harness.write_report(
        options.output, {"what": about, **harness.header("simulated"), "rows": rows}
    )


def row(model: str, length: str, *, node: str, nodes: int) -> Row:
    """Return the plan of a model at a length on some nodes, with ZeRO-3 if nothing else fits."""
    preset, *more = model.split()
    words = [
        *(f"hardware.preset={node}", f"hardware.nodes={nodes}"),
        *(f"model.preset={preset}", f"sequence.length={length}", *more),
    ]
    found = plan(words)
    if not found["feasible"]:
        sharded = plan([*words, "parallel.zero=3"])
        if sharded["feasible"]:
            words, found = [*words, "parallel.zero=3"], sharded
    command = shlex.join(["sppo", "solve", _RUN, *words])
    devices = nodes * _DEVICES_PER_NODE
    name = f"{preset}, attention everywhere" if more else preset
    asked = {"model": name, "tokens": length, "devices": devices, "node": node}
    return {**asked, "command": command, **found}


def plan(words: Sequence[str]) -> Mapping[str, Any]:
    """Return the figures of the best plan of a request, or why nothing fits."""
    run = load_run(harness.ROOT / _RUN, words)
    counts = {"parameters": counts_text(run)}
    solution = solve(run, hardware=run_hardware(run))
    best, nearest = solution.best, solution.nearest if solution.best is None else None
    if best is None:
        reason = None if nearest is None else nearest.reason
        return {**counts, "feasible": False, "reason": reason}
    predicted, candidate = predict(best), best.candidate
    return {
        **counts,
        "feasible": True,
        **best.degrees.by_name,
        "virtual_stages": candidate.virtual_stages,
        "num_subsequences": len(candidate.lengths),
        "zero": candidate.zero,
        "step_s": predicted.step_s,
        "mfu": predicted.mfu,
        "device_peak_bytes": predicted.device_peak_bytes,
        "node_host_peak_bytes": best.node_host_bytes,
    }


def markdown(rows: Sequence[Row]) -> str:
    """Return a table of the rows."""
    headings = ["model", "tokens", "GPUs", "ways", "N", "tokens/s a device", "MFU", "memory"]
    rule = "|".join(["---"] * len(headings))
    lines = [f"| {' | '.join(headings)} |", f"|{rule}|", *map(_line, rows)]
    return "\n".join(lines)


def _line(one: Row) -> str:
    begin = f"| {one['model']} | {one['tokens']} | {one['devices']} {one['node'].upper()} |"
    if not one["feasible"]:
        return f"{begin} does not fit | | | | |"
    ways = f"SP {one['sequence_parallel_degree']}, PP {one['pipeline_parallel_degree']}"
    ways += f", v {one['virtual_stages']}" if one["virtual_stages"] > 1 else ""
    ways += ", ZeRO-3" if one["zero"] == 3 else ""
    speed = parse_size(one["tokens"]) / one["step_s"] / one["devices"]
    host = one["node_host_peak_bytes"]
    memory = format_bytes(one["device_peak_bytes"]) + (f" + {format_bytes(host)}" if host else "")
    figures = f"{one['num_subsequences']} | {speed:.0f} | {one['mfu']:.1%}"
    return f"{begin} {ways} | {figures} | {memory} |"


if __name__ == "__main__":
    main()
