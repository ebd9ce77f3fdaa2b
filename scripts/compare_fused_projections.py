r"""Compare separate with fused projections: q, k and v of a layer, or gate and up, as one product.

A layer multiplies the same tokens with two or three weights. This is one product if the weights lie
in one storage, or if they are concatenated at each use. In backward the gradients are separate
tensors and have to be concatenated. Forward, input gradient and weight gradient are timed on the
CPU or a GPU, all ways in turn in every round; a ratio is the median of the ratios of single rounds.

    OMP_WAIT_POLICY=passive python scripts/compare_fused_projections.py
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from option_types import one_of, output_file, positive, several  # beside this file
from torch import Tensor

from sppo.kernels.linear import accumulate_weight_gradient, linear
from sppo.output_file import write_text

WIDTHS: Mapping[str, Mapping[int, tuple[int, ...]]] = {
    "q/k/v": {1024: (1024, 256, 256), 2048: (2048, 512, 512), 4096: (4096, 1024, 1024)},
    "gate/up": {1024: (2816, 2816), 2048: (8192, 8192), 4096: (14336, 14336)},
}
"""Outputs of each projection by hidden size, with four query heads per key/value head."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_LEAST_S = 0.02
_Ways = Mapping[str, Callable[[], object]]


def main() -> None:
    """Parse arguments, measure, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=several(positive), default=[1024, 2048])
    parser.add_argument("--tokens", type=several(positive), default=[256, 1024, 4096])
    parser.add_argument("--dtypes", type=several(one_of(*DTYPES)), default=list(DTYPES))
    parser.add_argument("--device", type=one_of("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--turns", type=positive, default=7, help="measured, after one that warms up"
    )
    parser.add_argument("--threads", type=positive, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=output_file, help="write the figures to this JSON file")
    arguments = parser.parse_args()
    unknown = [str(h) for h in arguments.hidden if h not in WIDTHS["q/k/v"]]
    if unknown:
        parser.error(f"argument --hidden: {unknown[0]} is not one of 1024, 2048, 4096")
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    rows = []
    for dtype in arguments.dtypes:
        for kind, widths in WIDTHS.items():
            for hidden in arguments.hidden:
                for tokens in arguments.tokens:
                    case = {"projections": kind, "dtype": dtype, "hidden": hidden, "tokens": tokens}
                    for row in _measure(case, widths[hidden], arguments):
                        rows.append(row)
                        print(_line(row), flush=True)
    if arguments.output is not None:
        write_text(arguments.output, json.dumps(_report(arguments, rows), indent=1) + "\n")


def _measure(
    case: dict[str, Any], outputs: tuple[int, ...], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return one row of figures for each pass of a case."""
    rows = []
    for name, ways in _passes(case, outputs, arguments.device).items():
        seconds = _seconds(ways, turns=arguments.turns, device=arguments.device)
        row = {**case, "pass": name}
        for way, found in seconds.items():
            row[f"{way}_s"] = statistics.median(found)
            if way != "separate":
                pairs = zip(found, seconds["separate"], strict=True)
                row[f"{way}_ratio"] = statistics.median(a / b for a, b in pairs)
        rows.append(row)
    return rows


def _passes(case: Mapping[str, Any], outputs: tuple[int, ...], device: str) -> Mapping[str, _Ways]:
    """Return the ways to compute each pass, by pass and way."""
    dtype, hidden, tokens = DTYPES[case["dtype"]], case["hidden"], case["tokens"]
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).mul_(hidden**-0.5).to(device, dtype)

    x = random(tokens, hidden)
    weights = [random(width, hidden) for width in outputs]
    gradients = [random(tokens, width) for width in outputs]
    in_one = torch.cat(weights)
    totals = [torch.zeros(w.shape, device=device) for w in weights]
    total_in_one = torch.cat(totals)

    def input_gradient() -> Tensor:
        dx = gradients[0] @ weights[0]
        for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
            dx.addmm_(gradient, weight)
        return dx

    def weight_gradients() -> None:
        for total, gradient in zip(totals, gradients, strict=True):
            accumulate_weight_gradient(total, gradient, x)

    return {
        "forward": {
            "separate": lambda: [linear(x, weight) for weight in weights],
            "one_storage": lambda: torch.split(linear(x, in_one), list(outputs), 1),
            "one_storage_apart": lambda: [
                part.contiguous() for part in torch.split(linear(x, in_one), list(outputs), 1)
            ],
            "concatenated": lambda: torch.split(linear(x, torch.cat(weights)), list(outputs), 1),
        },
        "input gradient": {
            "separate": input_gradient,
            "one_storage": lambda: torch.cat(gradients, 1) @ in_one,
            "concatenated": lambda: torch.cat(gradients, 1) @ torch.cat(weights),
        },
        "weight gradients": {
            "separate": weight_gradients,
            "one_storage": lambda: accumulate_weight_gradient(
                total_in_one, torch.cat(gradients, 1), x
            ),
        },
    }


def _seconds(ways: _Ways, *, turns: int, device: str) -> dict[str, list[float]]:
    """Return the seconds of one call, by way and turn; short calls are repeated."""
    calls = {way: _calls(call, device) for way, call in ways.items()}
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(turns):
        for way, call in ways.items():
            found[way].append(_time(call, calls[way], device) / calls[way])
    return found


def _calls(call: Callable[[], object], device: str) -> int:
    """Warm up a call, and return the number of calls in a turn that can be timed accurately."""
    call()
    return max(1, round(_LEAST_S / max(1e-6, _time(call, 1, device))))


def _time(call: Callable[[], object], count: int, device: str) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _line(row: Mapping[str, Any]) -> str:
    case = f"{row['projections']} {row['dtype']} E={row['hidden']} C={row['tokens']} {row['pass']}"
    ratios = [
        f"{name.removesuffix('_ratio').replace('_', ' ')} {value:.2f}"
        for name, value in row.items()
        if name.endswith("_ratio")
    ]
    return f"{case:<48} {1e3 * row['separate_s']:8.2f} ms; times as long: {', '.join(ratios)}"


def _report(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()} {arguments.device}, {arguments.threads} threads",
        "command": shlex.join(["python", f"scripts/{Path(__file__).name}", *sys.argv[1:]]),
        "torch": torch.__version__,
        "rows": rows,
    }


if __name__ == "__main__":
    main()
