"""Compare SPPO with torch.distributed.pipelining on two pipeline ranks on the CPU.

Both sides run forward and backward of a step of the same Llama-shaped model in bf16, with the same
weights, tokens and tiled loss, and recompute nothing. A rank is a process with one thread; ranks
communicate over gloo. SPPO runs each sequence in N subsequences; torch runs whole sequences as
micro-batches, with GPipe for one sequence and 1F1B for more. The sides alternate step by step; the
waiting side sleeps.

    python -m experiments.pipelining --length 16Ki --subsequences 8 --sequences 2,4
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from experiments import harness
from experiments.planned_rank import PlannedRank, random_tokens
from experiments.torch_pipeline import TorchPipeline
from sppo.config import ModelConfig
from sppo.training.devices.cpu_device import CpuDevice

SIDES = ("sppo", "torch")
RANKS = 2
LARGEST_DIFFERENCE = 0.02
"""Largest relative difference of losses and gradient norms: both sides round to bf16, in different
places."""


def main() -> None:
    """Compare each number of sequences, print the tables, write the JSON."""
    parser = harness.parser(__doc__)
    parser.add_argument("--length", type=harness.positive, default=32768, help="of a sequence")
    parser.add_argument("--subsequences", type=harness.positive, default=8, help="of a sequence")
    parser.add_argument(
        "--sequences",
        type=harness.several(harness.positive),
        default=[1, 2, 4],
        help="of a step, by commas",
    )
    parser.add_argument("--steps", type=harness.positive, default=1, help="measured, of each side")
    parser.add_argument("--partition", default="flops", help="sequence.partition of SPPO's side")
    parser.add_argument("--schedule", default="auto", help="parallel.schedule of SPPO's side")
    options = parser.parse_args()
    cases: list[dict[str, Any]] = []
    for sequences in options.sequences:
        cases.append(compare(options, sequences))
        print_case(cases[-1])
        harness.write_report(
            options.output, {**harness.header(), "model": harness.MODEL, "cases": cases}
        )
    if any(case["largest_difference"] > LARGEST_DIFFERENCE for case in cases):
        sys.exit("error: the two sides do not compute the same")


def compare(options: argparse.Namespace, sequences: int) -> dict[str, Any]:
    """Run the steps of both sides in turns, and return their figures."""
    sides = {
        side: harness.Side(side, _make, (side, options, sequences), ranks=RANKS) for side in SIDES
    }
    label = f"{sequences} x {options.length} "
    turns = harness.take_turns(sides, turns=options.steps, label=label)
    found = {side: _measurement(turns[side]) for side in SIDES}
    ours, theirs = found.values()
    agree = [
        a / b
        for a, b in zip(
            [ours["loss"], *ours["gradient_norm"]],
            [theirs["loss"], *theirs["gradient_norm"]],
            strict=True,
        )
    ]
    return {
        "length_tokens": options.length,
        "sequences": sequences,
        "sides": found,
        "speedup": theirs["step_s"] / ours["step_s"],
        "peak_ratio": [
            a / b for a, b in zip(ours["peak_bytes"], theirs["peak_bytes"], strict=True)
        ],
        "largest_difference": max(abs(ratio - 1) for ratio in agree),
    }


def _measurement(turns: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Return the figures of one side; lists have an entry per rank."""
    by_rank = [*zip(*turns, strict=True)]
    last = turns[-1]
    return {
        "schedule": last[0]["schedule"],
        "step_s": statistics.median(max(rank["step_s"] for rank in turn) for turn in turns),
        "peak_bytes": [max(turn["peak_bytes"] for turn in rank) for rank in by_rank],
        "cpu_share": [statistics.fmean(turn["cpu_share"] for turn in rank) for rank in by_rank],
        "loss": sum(rank["loss"] for rank in last),  # 0 before the last stage of torch
        "gradient_norm": [rank["gradient_norm"] for rank in last],
        "idle_share": last[0].get("idle_share"),
        "planned_idle_share": last[0].get("planned_idle_share"),
    }


def _make(rank: int, arguments: tuple[str, argparse.Namespace, int]) -> Callable[[], Any]:
    """Set up a rank of one side, and run a step without counting it."""
    side, options, sequences = arguments
    pipeline = (_SppoPipeline if side == "sppo" else _torch)(rank, options, sequences)
    pipeline.step()
    pipeline.findings()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    if side == "sppo":
        CpuDevice().trim()
    return partial(_measured, pipeline, harness.Meter(counted_bytes=pipeline.gradient_bytes))


def _measured(pipeline: Any, meter: harness.Meter) -> dict[str, Any]:
    return {**meter.measure(pipeline.step), **pipeline.findings()}


def _torch(rank: int, options: argparse.Namespace, sequences: int) -> Any:
    model = ModelConfig.model_validate(harness.MODEL)
    tokens_MT = random_tokens(sequences, options.length)
    return TorchPipeline(model, tokens_MT, rank=rank)


class _SppoPipeline(PlannedRank):
    """One rank of SPPO's pipeline, which retains everything."""

    def __init__(self, rank: int, options: argparse.Namespace, sequences: int) -> None:
        keys = {
            "model": harness.MODEL,
            "sequence": {
                "length": options.length,
                "num_subsequences": options.subsequences,
                "partition": options.partition,
            },
            "parallel": {
                "pipeline_parallel_degree": RANKS,
                "virtual_stages": 1,
                "schedule": options.schedule,
                "multiplexed": "off",  # what that gains is compared by experiments.orders
            },
            "activations": {"policy": "retain"},
            "train": {"sequences_per_step": sequences},
        }
        super().__init__(keys, rank=rank)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the fp32 gradient sums, which exist between steps."""
        return sum(gradient.nbytes for gradient in self.state.gradients.values())

    def findings(self) -> dict[str, Any]:
        """Return figures of the last step."""
        timeline, gradients = self.timeline(), list(self.state.gradients.values())
        assert self.done is not None, "after a step"
        return {
            "schedule": self.plan.schedule,
            "boundaries": self.plan.boundaries,
            "planned_idle_share": self.plan.predicted.bubble_fraction,
            "idle_share": None if timeline is None else timeline.bubble_fraction,
            "loss": float(self.done.total_loss) / self.done.num_valid,
            "gradient_norm": float(torch.stack(list(torch._foreach_norm(gradients))).norm()),
        }


def print_case(case: dict[str, Any]) -> None:
    """Print the figures of both sides with one number of sequences."""
    print(f"\n{case['sequences']} x {case['length_tokens']} tokens")
    harness.print_table(
        ("side", "step", "peak by rank", "busy by rank", "loss"),
        [
            (
                f"{side} {found['schedule']}",
                f"{found['step_s']:.2f} s",
                " ".join(f"{peak / 2**20:.0f} MiB" for peak in found["peak_bytes"]),
                " ".join(f"{share:.2f}" for share in found["cpu_share"]),
                f"{found['loss']:.4f}",
            )
            for side, found in case["sides"].items()
        ],
    )
    ratios = " ".join(f"{ratio:.3f}" for ratio in case["peak_ratio"])
    ours = case["sides"]["sppo"]
    print(
        f"sppo / torch: tokens/s {case['speedup']:.3f}, peak memory by rank {ratios}; losses and "
        f"gradient norms within {case['largest_difference']:.2%}; idle share of SPPO's ranks "
        f"{ours['idle_share']:.3f} measured, {ours['planned_idle_share']:.3f} planned\n",
        flush=True,
    )


if __name__ == "__main__":
    main()
