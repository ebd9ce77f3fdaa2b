"""Compare step time and memory of SPPO with transformers on the CPU.

Both sides train the same Llama-shaped model in bf16 on the same tokens, with the same tiled loss
and the same AdamW over fp32 master weights. Each side is a separate process, so that peak memory is
measured per side. The sides alternate step by step.

    python -m experiments.cpu --lengths 8Ki,16Ki,32Ki,64Ki --steps 3 --output cpu.json
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments import harness
from experiments.growth_plot import growth_plot
from experiments.planned_rank import PlannedRank, random_tokens
from sppo.config import ModelConfig
from sppo.config.huggingface.model_config import hf_config
from sppo.training.records.outcome import MeasuredBuckets

LOOPED = {"virtual_stages": harness.MODEL["num_layers"], "schedule": "looped_bfs"}
"""Section ``parallel`` of a stage for every layer."""
NARROW = {
    **{"vocab_size": 4096, "hidden_size": 128, "num_layers": 4, "mlp_size": 384},
    **{"num_heads": 2, "num_kv_heads": 1, "head_size": 32},
}
HYBRID = {
    **NARROW,
    "layer_types": ["linear", "linear", "linear", "full"],
    "linear_attention": {"key_heads": 1, "value_heads": 2, "key_size": 32, "value_size": 32},
}
"""Three layers of four have linear attention, with as many heads, of the same size."""
SPPO_SIDES: dict[str, dict[str, Any]] = {
    "sppo retain": {"activations": {"policy": "retain"}},
    "sppo keep_attention": {"activations": {"policy": "keep_attention", "input_every": 3}},
    "sppo looped": {
        "activations": {"policy": "keep_attention", "kv": "recompute"},
        "parallel": LOOPED,
    },
    "sppo disk": {"activations": {"policy": "offload_all"}},
    "sppo looped disk": {
        "activations": {"policy": "offload_all", "kv": "offload"},
        "parallel": LOOPED,
    },
    "sppo attention everywhere": {"model": NARROW, "activations": {"policy": "keep_attention"}},
    "sppo hybrid": {"model": HYBRID, "activations": {"policy": "keep_attention"}},
}
"""Sections of the run file by side."""
DISK_SIDES = ("sppo disk", "sppo looped disk")
OTHER_SIDES = {"transformers": False, "transformers checkpointing": True}
"""Whether every layer is recomputed, by side."""
_PLANNED = ("tensors_peak_bytes", "predicted_peak_bytes", "kv_bytes")
"""Figures of SPPO's sides: peak memory of all tensors, its prediction, and the part that keys and
values, their gradients and states take."""
PAIRS = (
    ("sppo retain", "transformers"),
    ("sppo keep_attention", "transformers checkpointing"),
    ("sppo looped", "sppo keep_attention"),
    ("sppo disk", "sppo retain"),
    ("sppo looped disk", "sppo disk"),
    ("sppo looped disk", "transformers checkpointing"),
    ("sppo hybrid", "sppo attention everywhere"),
)
"""Pairs of sides whose ratios are printed."""


def main() -> None:
    """Run the sides in turns at each length, print the tables, write the JSON."""
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--lengths", type=harness.several(harness.positive), default=[16384], help="by commas"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=5,
        help="measured, of each side; 0 measures the first one, whose forwards run before the "
        "gradients of K and V have memory",
    )
    parser.add_argument("--threads", type=harness.positive, default=os.cpu_count() or 1)
    parser.add_argument(
        "--sides",
        type=harness.several(harness.one_of(*SPPO_SIDES, *OTHER_SIDES)),
        default=["sppo retain", "transformers", *PAIRS[1]],
        help="by commas",
    )
    parser.add_argument("--disk", type=Path, help="directory on a disk, for sides that offload")
    parser.add_argument("--plot", type=Path, help="draw time and memory of SPPO's sides here")
    options = parser.parse_args()
    offloading = [side for side in options.sides if side in DISK_SIDES]
    if offloading and (options.disk is None or not options.disk.is_dir()):
        parser.error(f"side {offloading[0]!r} offloads: name a directory with --disk DIR")
    measurements: list[dict[str, Any]] = []
    for length in options.lengths:
        found = compare(options, length)
        print_measurements(found)
        measurements += found
        report = {**harness.header(), "threads": options.threads, "measurements": measurements}
        harness.write_report(options.output, report)
    by_side = {side: [row for row in measurements if row["side"] == side] for side in options.sides}
    for rows in by_side.values():
        print_growth(rows)
    if options.plot is not None:
        growth_plot(options.plot, {side: by_side[side] for side in by_side if side in SPPO_SIDES})


def compare(options: argparse.Namespace, length: int) -> list[dict[str, Any]]:
    """Run the steps of all sides in turns; the first turn is a warm-up if there are more."""
    sides = {
        side: harness.Side(side, _make, (side, length, options.disk), threads=options.threads)
        for side in options.sides
    }
    turns = harness.take_turns(sides, turns=options.steps + 1, label=f"{length} ")
    answers = {side: [answer for (answer,) in found] for side, found in turns.items()}
    return [
        {
            "side": side,
            "length_tokens": length,
            "step_s": statistics.median(answer["step_s"] for answer in found[1:] or found),
            "peak_bytes": max(answer["peak_bytes"] for answer in found),
            "loss": found[-1]["loss"],
            **{key: max(answer[key] for answer in found) for key in _PLANNED if key in found[0]},
        }
        for side, found in answers.items()
    ]


def _make(_rank: int, arguments: tuple[str, int, Path | None]) -> Callable[[], dict[str, Any]]:
    """Build one side: its model, optimizer and engine."""
    side, length, disk = arguments
    if side in OTHER_SIDES:
        return partial(_measured, harness.Meter(), _transformers(side, length))
    rank = _sppo(side, length, disk)
    return partial(_planned, harness.Meter(), rank)


def _measured(meter: harness.Meter, step: Callable[[], float]) -> dict[str, Any]:
    losses: list[float] = []
    return {**meter.measure(lambda: losses.append(step())), "loss": losses[0]}


def _planned(meter: harness.Meter, rank: PlannedRank) -> dict[str, Any]:
    """Return the figures of a step, beside those of its plan."""
    device, engine = rank.job.device, rank.state.engine
    device.reset_peak()
    engine.take_peaks()
    measured = {**meter.measure(rank.step), "loss": rank.loss()}
    buckets = MeasuredBuckets()
    buckets.count_state(rank.state)
    buckets.count_step(engine.take_peaks(), copies_bytes=0, pool=device.pool())
    planned = rank.plan.stages[0].memory.device
    return {
        **measured,
        "tensors_peak_bytes": sum(asdict(replace(buckets, free_bytes=0)).values()),
        "predicted_peak_bytes": planned.total_bytes - planned.growth_bytes,
        "kv_bytes": buckets.kv_bytes,
    }


def _sppo(side: str, length: int, disk: Path | None) -> PlannedRank:
    activations = SPPO_SIDES[side]["activations"]
    if side in DISK_SIDES:
        activations = {**activations, "disk": str(disk)}
    keys = {
        "model": harness.MODEL,
        "sequence": {
            "length": length,
            "num_subsequences": max(1, length // 2048),
            "partition": "length",
        },
        **SPPO_SIDES[side],
        "activations": activations,
    }
    return PlannedRank(keys, updates=True)


def _transformers(side: str, length: int) -> Callable[[], float]:
    from transformers import LlamaConfig
    from transformers_training import TransformersTraining  # of scripts/

    model = ModelConfig.model_validate({**harness.MODEL, "max_positions": length + 1})
    config = LlamaConfig(**hf_config(model, dtype="bf16"))
    (tokens,) = random_tokens(1, length)
    training = TransformersTraining(config, tokens, checkpointing=OTHER_SIDES[side])
    step: Callable[[], float] = training.step
    return step


def print_measurements(rows: Sequence[dict[str, Any]]) -> None:
    """Print step time, memory and loss of each side at one length, and ratios of sides."""
    harness.print_table(
        ("side", "tokens", "step", "peak", "loss"),
        [
            (
                row["side"],
                row["length_tokens"],
                f"{row['step_s']:.2f} s",
                f"{row['peak_bytes'] / 2**20:.0f} MiB",
                f"{row['loss']:.3f}",
            )
            for row in rows
        ],
    )
    by_side = {row["side"]: row for row in rows}
    for ours, theirs in PAIRS:
        if ours in by_side and theirs in by_side:
            time, memory = (
                by_side[ours][key] / by_side[theirs][key] for key in ("step_s", "peak_bytes")
            )
            print(f"{ours} / {theirs}: time {time:.3f}, peak memory {memory:.3f}", flush=True)


def print_growth(rows: Sequence[dict[str, Any]]) -> None:
    """Print fits of a side over the sequence length: memory as a line, time as a·S + b·S².

    Least squares of relative errors, so that short and long lengths have equal weight. Prints
    nothing for fewer than three lengths, which would leave no residual.
    """
    if len(rows) < 3:
        return
    tokens = np.array([row["length_tokens"] / 1024 for row in rows])
    memory = [row["peak_bytes"] / 2**20 for row in rows]
    for name, values, terms in (
        ("time s", [row["step_s"] for row in rows], {"S": tokens, "S²": tokens**2}),
        ("peak MiB", memory, {"1": np.ones_like(tokens), "S": tokens}),
    ):
        design = np.stack([*terms.values()], axis=1) / np.array(values)[:, None]
        fit, *_ = np.linalg.lstsq(design, np.ones_like(tokens), rcond=None)
        worst = float(np.abs(design @ fit - 1).max())
        formula = " + ".join(f"{c:.4g}·{power}" for c, power in zip(fit, terms, strict=True))
        print(f"{rows[0]['side']}: {name} = {formula} (S in Ki tokens), off by {worst:.1%}")


if __name__ == "__main__":
    main()
