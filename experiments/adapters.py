"""Plan training with and without adapters on few GPUs: what fits, how fast, on how many devices.

Every cell is what ``sppo solve`` answers on presets, with analytic rates and a simulated step;
nothing is trained. The table is printed in Markdown.

    python -m experiments.adapters --output docs/results/planned_adapters.json
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from experiments import harness
from sppo.cli.solution.candidate import choices_json
from sppo.config import load_run
from sppo.hardware.run_hardware import run_hardware
from sppo.planning.make_plan import predict
from sppo.planning.search.solver import solve
from sppo.units import format_bytes, format_duration

MODELS = {"llama-3.1-8b": "Llama-3.1-8B", "llama-3.1-70b": "Llama-3.1-70B"}
LENGTHS = ("128Ki", "512Ki")
ADAPTER = "adapter.rank=16"
TRAINED = {"": "all weights", ADAPTER: "adapters of rank 16"}
"""What trains, by the override that asks for it."""
DEVICES = (1, 2, 4, 8)
_RUN = "configs/run/llama_8b_1m_1node.yaml"
_HOST_GIB = 256
"""Host memory of a machine for each of its GPUs: an eighth of that of the preset's node."""

Row = dict[str, Any]


def main() -> None:
    """Plan every cell, then print and write the results."""
    options = harness.parser(__doc__).parse_args()
    rows = []
    for model, length, change in product(MODELS, LENGTHS, TRAINED):
        rows.append(row(model, length, change, DEVICES))
        print(f"planned: {' '.join(rows[-1]['words'])}", flush=True)
    print(markdown(rows))
    about = (
        "Planned, never run: sppo solve on the preset h100 (analytic rates, simulated steps), with "
        f"{_HOST_GIB} GiB of host memory for each GPU."
    )
    harness.write_report(
        options.output, {"what": about, **harness.header("simulated"), "rows": rows}
    )


def row(model: str, length: str, change: str, devices: Sequence[int]) -> Row:
    """Return the plans of one model, length and what trains, on each number of devices."""
    words = [f"model.preset={model}", f"sequence.length={length}", *change.split()]
    plans = []
    for count in devices:
        machine = [
            "hardware.preset=h100",
            f"hardware.devices_per_node={count}",
            f"hardware.host_memory={_HOST_GIB * count}GiB",
        ]
        command = shlex.join(["sppo", "solve", _RUN, *machine, *words])
        plans.append({"devices": count, "command": command, **plan([*machine, *words])})
    fitting = [plan["devices"] for plan in plans if plan["feasible"]]
    return {
        "model": MODELS.get(model, model),
        "tokens": length,
        "trains": TRAINED[change],
        "words": words,
        "fewest_devices": min(fitting, default=None),
        "plans": plans,
    }


def plan(words: Sequence[str]) -> Mapping[str, Any]:
    """Return the figures of the best plan of a request, or why nothing fits."""
    run = load_run(harness.ROOT / _RUN, words)
    solution = solve(run, hardware=run_hardware(run))
    best, nearest = solution.best, solution.nearest if solution.best is None else None
    if best is None:
        return {"feasible": False, "reason": None if nearest is None else nearest.reason}
    predicted, choices = predict(best), choices_json(best)
    del choices["subsequence_lengths"]  # N of them, which the command prints
    return {
        "feasible": True,
        "step_s": predicted.step_s,
        "mfu": predicted.mfu,
        "device_peak_bytes": predicted.device_peak_bytes,
        "node_host_peak_bytes": best.node_host_bytes,
        **best.degrees.by_name,
        "virtual_stages": best.candidate.virtual_stages,
        **choices,
    }


def markdown(rows: Sequence[Row]) -> str:
    """Return a table of the rows: seconds of a step, memory of a device and of the host."""
    devices = [plan["devices"] for plan in rows[0]["plans"]]
    headings = ["model, tokens", "trains", *map(_machine, devices), "fits from"]
    lines = [headings, ["---"] * len(headings)]
    for one in rows:
        fewest = one["fewest_devices"]
        lines.append(
            [
                f"{one['model']}, {one['tokens']}",
                one["trains"],
                *map(_cell, one["plans"]),
                "none of these" if fewest is None else _machine(fewest),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _machine(devices: int) -> str:
    return f"{devices} H100"


def _cell(plan: Mapping[str, Any]) -> str:
    if not plan["feasible"]:
        return "no"
    host = plan["node_host_peak_bytes"]
    sizes = format_bytes(plan["device_peak_bytes"]) + (f" + {format_bytes(host)}" if host else "")
    return f"{format_duration(plan['step_s'])}, {sizes}"


if __name__ == "__main__":
    main()
