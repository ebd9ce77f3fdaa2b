r"""Compare time and memory of the tiled projection and loss with plain projection and loss.

The plain side projects all tokens to logits, computes torch's cross entropy in fp32, and runs
autograd backward. Each side is a separate process, so that peak memory is measured per side; the
sides alternate. Extra memory is everything except the operands, the requested gradients, and the
losses. ``--sides tiled`` measures sizes at which the plain side does not fit.

    OMP_WAIT_POLICY=passive python scripts/compare_cross_entropy.py
    OMP_WAIT_POLICY=passive python scripts/compare_cross_entropy.py \
        --tokens 16384 --vocabulary 131072 --hidden 2048 --sides tiled
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from option_types import one_of, output_file, positive, several  # beside this file
from turns import take_turns  # beside this file

from sppo.output_file import write_text

if TYPE_CHECKING:
    from torch import Tensor

SIDES = ("tiled", "plain")
MIB = 1 << 20


def main() -> None:
    """Parse arguments, time the sides in turns, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=positive, default=4096)
    parser.add_argument("--vocabulary", type=positive, default=32768)
    parser.add_argument("--hidden", type=positive, default=1024)
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument(
        "--sides", type=several(one_of(*SIDES)), default=",".join(SIDES), help="which of both"
    )
    parser.add_argument(
        "--turns", type=positive, default=5, help="measured, after one that warms up"
    )
    parser.add_argument("--threads", type=positive, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=output_file, help="add the figures to this JSON file")
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        _serve(arguments)
        return
    commands = {side: [__file__, *sys.argv[1:], "--worker", side] for side in arguments.sides}
    answers = take_turns(commands, turns=arguments.turns + 1, threads=arguments.threads)
    report = _report(arguments, {side: found[1:] for side, found in answers.items()})
    _print(report)
    if arguments.output is not None:
        _append(arguments.output, report)


def _serve(arguments: argparse.Namespace) -> None:
    """Answer each line on stdin with one measured pass, as a worker process."""
    import torch

    from sppo.kernels.native.process_memory import peak_resident_bytes, reset_peak, resident_bytes

    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[arguments.dtype]
    tokens, vocabulary, width = arguments.tokens, arguments.vocabulary, arguments.hidden
    hidden = torch.randn(tokens, width, generator=generator).to(dtype)
    weight = torch.randn(vocabulary, width, generator=generator).mul_(width**-0.5).to(dtype)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    passes = {"tiled": _tiled, "plain": _plain}
    make = passes[arguments.worker]
    make(hidden[:256].clone(), weight[:256].clone(), labels[:256] % 256)()  # threads, libraries
    step = make(hidden, weight, labels)
    before = resident_bytes()
    print("ready", flush=True)
    for _ in sys.stdin:
        reset_peak()
        start = time.perf_counter()
        loss, returned_bytes = step()
        seconds = time.perf_counter() - start
        extra = peak_resident_bytes() - before - returned_bytes
        print(json.dumps({"step_s": seconds, "extra_bytes": extra, "loss": loss}), flush=True)


Pass = Callable[[], tuple[float, int]]
"""Function that computes loss and gradients once, and returns the mean loss and the bytes of
returned tensors."""


def _tiled(hidden: Tensor, weight: Tensor, labels: Tensor) -> Pass:
    """Return SPPO's pass; the fp32 gradient of the weight exists before it, as in training."""
    import torch

    from sppo.kernels.cross_entropy import linear_cross_entropy_with_gradient
    from sppo.kernels.native.cpu_allocator import install_cpu_allocator

    install_cpu_allocator()
    total = torch.ones(weight.shape, dtype=torch.float32)

    @torch.no_grad()
    def step() -> tuple[float, int]:
        total.zero_()
        losses, dhidden = linear_cross_entropy_with_gradient(
            hidden, weight, labels, scale=1 / len(labels), dweight_VE=total
        )
        return float(losses.mean()), losses.nbytes + dhidden.nbytes

    return step


def _plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Pass:
    """Return the plain pass under autograd; its gradients have the dtype of the operands."""
    import torch
    from torch.nn import functional

    leaves = (hidden.requires_grad_(), weight.requires_grad_())

    def step() -> tuple[float, int]:
        logits = functional.linear(*leaves)
        loss = functional.cross_entropy(logits.float(), labels)
        gradients = torch.autograd.grad(loss, leaves)
        return float(loss.detach()), sum(x.nbytes for x in gradients)

    return step


def _report(
    arguments: argparse.Namespace, answers: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()} CPU, {arguments.threads} threads",
        "command": shlex.join(["python", *sys.argv]),
        "tokens": arguments.tokens,
        "vocabulary": arguments.vocabulary,
        "hidden": arguments.hidden,
        "dtype": arguments.dtype,
        "sides": {
            side: {
                "seconds": statistics.median(answer["step_s"] for answer in found),
                "extra_bytes": max(answer["extra_bytes"] for answer in found),
                "loss": found[-1]["loss"],
            }
            for side, found in answers.items()
        },
    }
    if set(answers) == set(SIDES):
        pairs = zip(answers["tiled"], answers["plain"], strict=True)
        report["time_ratio"] = statistics.median(a["step_s"] / b["step_s"] for a, b in pairs)
    return report


def _print(report: dict[str, Any]) -> None:
    print(
        f"{report['tokens']} tokens, vocabulary {report['vocabulary']}, hidden {report['hidden']}, "
        f"{report['dtype']}"
    )
    for side, found in report["sides"].items():
        print(
            f"  {side:<6} {found['seconds']:8.3f} s   extra memory "
            f"{found['extra_bytes'] / MIB:8.1f} MiB   loss {found['loss']:.4f}"
        )
    if "time_ratio" in report:
        print(f"  tiled takes {report['time_ratio']:.3f}x the time of plain")


def _append(path: Path, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    reports = json.loads(path.read_text()) if path.exists() else []
    write_text(path, json.dumps([*reports, report], indent=1) + "\n")


if __name__ == "__main__":
    main()
