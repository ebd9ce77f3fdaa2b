"""Main results in one table: each a sentence whose figures come from a report in docs/results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from sppo.units import format_bytes, format_duration

Report = Mapping[str, Any]


class Claim(NamedTuple):
    """Result and how it was obtained."""

    report: str
    """Name of the report, without ``.json``."""
    kind: str
    """How the figures were obtained: "measured" or "simulated"."""
    command: str
    """Command that makes such a report today."""
    text: Callable[[Report], str]
    """Function that returns the sentence, given the report."""
    machine: str = ""
    """Machine that the figures are of; empty if the report names it."""


HEADINGS = ("result", "kind", "machine, date", "made by, figures")


def rows(report_of: Callable[[str], Report]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each claim, given the function that reads a report."""
    for claim in CLAIMS:
        report = report_of(claim.report)
        machine = claim.machine or report.get("machine") or report["device"]
        yield (
            claim.text(report),
            f"*{claim.kind}*",
            f"{_short(machine)}, {report['date']}",
            f"`{claim.command}` ([figures](results/{claim.report}.json))",
        )


def _short(machine: str) -> str:
    """Return the name of a machine without versions and what else it was doing."""
    return machine.partition(" torch ")[0].partition(", other ")[0].partition(" (preset ")[0]


def _long_on_a_gpu(report: Report) -> str:
    (case,) = report["training"]["cases"]
    run, memory = case["runs"]["hybrid"], case["runs"]["hybrid"]["memory_bytes"]["all"]
    return (
        f"Llama-3.2-1B trains on 128Ki tokens in {format_duration(run['step_s'])} a step and "
        f"{format_bytes(memory['measured'])}. Predicted from the machine's rates: "
        f"{format_duration(run['predicted_step_s'])}, {format_bytes(memory['predicted'])}."
    )


def _offloading_on_a_gpu(report: Report) -> str:
    times, (other,) = report["training"]["times"][0], report["training"]["transformers"]
    time = times["step_s"]["offload_all"] / other["step_s"]
    memory = times["device_peak_bytes"]["offload_all"] / other["device_peak_bytes"]
    return (
        f"Offloading all saved activations of 32Ki tokens takes {time:.2f}x the time and "
        f"{memory:.2f}x the memory of transformers with gradient checkpointing."
    )


def _experts_and_windows(report: Report) -> str:
    runs = [run for case in report["cases"] for run in case["runs"].values()]
    steps = [run["predicted_step_s"] / run["step_s"] - 1 for run in runs]
    memory = [run["memory_bytes"]["all"] for run in runs]
    off = max(abs(one["predicted"] / one["measured"] - 1) for one in memory)
    return (
        "A few layers of Qwen3-30B-A3B, gpt-oss-20b and Gemma-3-4B, and Llama-3.2-1B: steps are "
        f"predicted {-min(steps):.0%} too fast to {max(steps):.0%} too slow, memory within "
        f"{off:.1%}."
    )


def _beside_transformers(report: Report) -> str:
    ours, theirs = _of_length(report, 32 * 1024)
    return (
        "A Llama shape of 6 layers takes, at 32Ki tokens, "
        f"{ours['step_s'] / theirs['step_s']:.2f}x the time and "
        f"{ours['peak_bytes'] / theirs['peak_bytes']:.2f}x the memory of transformers with "
        "gradient checkpointing (one step of each)."
    )


def _stages_on_a_disk(report: Report) -> str:
    one, many, _ = _of_length(report, 64 * 1024)
    return (
        "With a stage for every layer and all activations on a disk, 64Ki tokens train in "
        f"{format_bytes(many['peak_bytes'])}: {many['peak_bytes'] / one['peak_bytes']:.2f}x the "
        f"memory and {many['step_s'] / one['step_s']:.2f}x the time of one stage."
    )


def _hybrid(report: Report) -> str:
    full, hybrid = _of_length(report, 64 * 1024)
    return (
        "A hybrid with three linear layers of four takes "
        f"{hybrid['step_s'] / full['step_s']:.2f}x the time and "
        f"{hybrid['kv_bytes'] / full['kv_bytes']:.2f}x the memory for K, V and states of attention "
        "everywhere, at 64Ki tokens."
    )


def _of_length(report: Report, tokens: int) -> list[Report]:
    return [one for one in report["measurements"] if one["length_tokens"] == tokens]


def _two_ranks(report: Report) -> str:
    cases = {case["sequences"]: case for case in report["cases"]}
    return (
        f"Two pipeline ranks process {cases[4]['speedup']:.2f}x (four sequences of 16Ki tokens) to "
        f"{cases[2]['speedup']:.2f}x (two) the tokens per second of 1F1B in "
        "torch.distributed.pipelining."
    )


def _documents(report: Report) -> str:
    sides = {
        name: [sum(steps) for steps in zip(*report["measured"][name]["all_step_s"], strict=True)]
        for name in ("fixed", "stream", "elastic_auto")
    }

    def gain(name: str) -> float:
        turns = zip(sides[name], sides["elastic_auto"], strict=True)
        return float(statistics.median(other / planned for other, planned in turns))

    return (
        f"Planned steps of 32 documents process {gain('fixed'):.2f}x the tokens per second of "
        f"fixed chunks and {gain('stream'):.2f}x of rows of the stream, on two ranks."
    )


def _predictions(report: Report) -> str:
    errors = []
    for case in report["cases"]:
        phases = case["phases_s"].values()
        predicted = sum(phase["predicted"] for phase in phases)
        errors.append(abs(predicted / sum(phase["measured"] for phase in phases) - 1))
    return (
        f"Steps of {len(errors)} random runs were predicted {statistics.median(errors):.1%} off in "
        f"the median and {max(errors):.1%} at worst, after `sppo bench`, on a machine that changes "
        "its speed."
    )


def _solver(report: Report) -> str:
    seconds = [request["processor_s"] for request in report["requests"]]
    return (
        f"`sppo solve` takes {min(seconds):.1f} to {max(seconds):.1f} s of one core for requests "
        "with 8 to 1024 GPUs and 1Mi or 4Mi tokens, while other programs use the cores."
    )


def _adapters(report: Report) -> str:
    keeps, retains = (row["ratios"] for row in report["rows"])
    return (
        f"Adapters of rank 16 take {keeps['peak_bytes']:.2f}x the memory of training all weights "
        f"with `keep_attention`, {retains['peak_bytes']:.2f}x with `retain`, at 16Ki tokens."
    )


def _models(report: Report) -> str:
    def fitting(devices: int) -> tuple[int, int]:
        found = [r for r in report["rows"] if r["devices"] == devices and r["tokens"] == "1Mi"]
        return sum(row["feasible"] for row in found), len(found)

    (node, models), (nodes, _) = fitting(8), fitting(64)
    return (
        f"Of {models} models of 3B to 235B parameters, {node} fit with all weights trained on 1Mi "
        f"tokens on one node, and {nodes} on eight ([table](results/models.md))."
    )


def _restarts(report: Report) -> str:
    seconds = report["median_s"]
    parts = ", ".join(f"{name} {took:.1f}" for name, took in seconds.items() if name != "in all")
    return (
        "With `train.restarts` a small run of two ranks is at its next good step "
        f"{seconds['in all']:.0f} s after one rank is killed (seconds until {parts})."
    )


def _corruption(report: Report) -> str:
    flips, ordinary = report["flips"], report["ordinary"].values()
    steps, alarms, again = (
        sum(one[key] for one in ordinary) for key in ("steps", "differed", "recomputed")
    )
    return (
        f"`train.watch` found {flips['found']} of {flips['with_effect']} flipped bits that change "
        f"the gradient norm by over 0.1 %, and {flips['weights_found']} of "
        f"{flips['weights_flipped']} in weights. Of {steps} ordinary steps it computed {again} "
        f"again and blamed {alarms}, for {report['cost']['share']:.2%} of a step."
    )


def _effective_time(report: Report) -> str:
    rows = [row for row in report["rows"] if row["rate"] == report["rows"][0]["rate"]]
    few, many = (min(rows, key=_devices), max(rows, key=_devices))
    automatic, fixed = (
        [f"{row['every'][every]['effective']:.1%}" for row in (few, many)]
        for every in ("auto", "100")
    )
    return (
        f"With `checkpoint.every: auto`, {automatic[0]} of the time of {few['devices']} GPUs and "
        f"{automatic[1]} of {many['devices']} GPUs trains, at the rate of faults of Llama 3; with "
        f"a checkpoint every 100 steps {fixed[0]} and {fixed[1]}."
    )


def _devices(row: Mapping[str, Any]) -> int:
    return int(row["devices"])


def _lead(report: Report) -> str:
    at = {row["tokens"]: row for row in report["rows"]}
    leads = [
        f"{row['plans']['published']['tokens_per_s'] / row['measured'][row['best']]:.2f}x"
        for row in (at["512Ki"], at["1Mi"], at["5Mi"])
    ]
    return (
        f"Llama-3.1-8B is planned at {leads[0]} the best measured speed of others at 512Ki tokens, "
        f"{leads[1]} at 1Mi and {leads[2]} at 5Mi ([comparison](comparison.md))."
    )


_CPU = "python -m experiments.cpu"
_GPU_CHECK = "bash scripts/gpu_check.sh"
CLAIMS: tuple[Claim, ...] = (
    Claim("gpu_h100_128Ki", "measured", _GPU_CHECK, _long_on_a_gpu),
    Claim("gpu_h100", "measured", _GPU_CHECK, _offloading_on_a_gpu),
    Claim("gpu_h100_models", "measured", _GPU_CHECK, _experts_and_windows),
    Claim(
        "compare_cpu_growth",
        "measured",
        f'{_CPU} --lengths 32Ki --steps 0 --sides "sppo keep_attention,transformers checkpointing"',
        _beside_transformers,
    ),
    Claim(
        "compare_looped_disk_64Ki",
        "measured",
        f'{_CPU} --lengths 64Ki --steps 0 --sides "sppo disk,sppo looped disk" --disk DIR',
        _stages_on_a_disk,
    ),
    Claim(
        "compare_hybrids",
        "measured",
        f'{_CPU} --lengths 64Ki --steps 0 --sides "sppo attention everywhere,sppo hybrid"',
        _hybrid,
    ),
    Claim(
        "compare_pipelining_16Ki",
        "measured",
        "python -m experiments.pipelining --length 16Ki --subsequences 8 --sequences 2,4",
        _two_ranks,
    ),
    Claim(
        "compare_elastic_32",
        "measured",
        "python -m experiments.packings --samples 32 --hardware FILE",
        _documents,
    ),
    Claim(
        "check_prediction_random",
        "measured",
        "sppo bench; sppo train RUN.yaml",
        _predictions,
    ),
    Claim(
        "trained_adapters",
        "measured",
        "python -m experiments.trained_adapters --length 16Ki",
        _adapters,
    ),
    Claim("restart_seconds", "measured", "python -m experiments.faults --table restart", _restarts),
    Claim("corruption_watch", "measured", "python -m experiments.corruption", _corruption),
    Claim("solve_seconds", "measured", "sppo solve RUN.yaml", _solver),
    Claim("planned_peers", "simulated", "python -m experiments.peers", _lead, "8 H100"),
    Claim("planned_models", "simulated", "python -m experiments.models", _models, "8 and 64 H100"),
    Claim(
        "effective_time",
        "simulated",
        "python -m experiments.faults --table effective",
        _effective_time,
        "H100, 8 to 16 384",
    ),
)
"""Results of the page, measured ones first."""
