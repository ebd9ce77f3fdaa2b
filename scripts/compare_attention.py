"""Compare attention in subsequences with one unsplit call on this device.

The unsplit side is one ``scaled_dot_product_attention`` over the whole sequence, forward and
backward, with keys and values already repeated for every query head. SPPO's side computes attention
subsequence by subsequence over the prefix, forward in order and backward in reverse; it writes keys
and values into their store and adds fp32 gradients of all keys in place. Both sides have the same
FLOPs and alternate in one process. Prints a table, and writes the figures as JSON.

    OMP_WAIT_POLICY=passive python scripts/compare_attention.py --length 16384
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
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from option_types import head_counts, one_of, output_file, positive, several  # beside this file
from torch import Tensor
from torch.nn import functional

from sppo.kernels.attention.interface import attention_backward, attention_forward
from sppo.kernels.attention.kv_layout import empty_keys
from sppo.output_file import write_text

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
UNSPLIT = 0
"""Key of the unsplit side, in place of the tokens of a subsequence."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Attention layer of one sequence."""

    length: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Times:
    """Median times of one subsequence length.

    Ratios are medians of the time relative to the unsplit call of the same turn.
    """

    problem: Problem
    tokens: int
    """Tokens of a subsequence."""
    forward_s: float
    backward_s: float
    forward_ratio: float
    backward_ratio: float
    both_ratio: float


Side = Callable[[], tuple[float, float]]
"""Function that runs forward and backward of a whole sequence and returns the seconds of both."""


def main() -> None:
    """Parse arguments, time the sides in turns, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=positive, default="16Ki", help="tokens of the sequence")
    parser.add_argument(
        "--tokens", type=several(positive), default="1Ki,2Ki,4Ki", help="of a subsequence; several"
    )
    parser.add_argument(
        "--heads", type=several(head_counts), default="8/2,8/8", help="query/key heads; several"
    )
    parser.add_argument("--head-size", type=positive, default=64)
    parser.add_argument("--dtypes", type=several(one_of(*DTYPES)), default="bf16,fp32")
    parser.add_argument(
        "--turns", type=positive, default=5, help="measured, after one that warms up"
    )
    parser.add_argument("--threads", type=positive, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=output_file, help="write the figures here as JSON")
    arguments = parser.parse_args()
    longest = max(arguments.tokens)
    if longest > arguments.length:
        parser.error(f"--tokens {longest}: more than the sequence's --length {arguments.length}")
    torch.set_num_threads(arguments.threads)
    found: list[Times] = []
    for dtype in arguments.dtypes:
        for heads, kv_heads in arguments.heads:
            problem = Problem(arguments.length, heads, kv_heads, arguments.head_size, dtype)
            found += compare(problem, arguments.tokens, turns=arguments.turns)
            _print(found[-len(arguments.tokens) :])
    if arguments.output is not None:
        _write(arguments.output, found, threads=arguments.threads)


def compare(problem: Problem, lengths: list[int], *, turns: int) -> list[Times]:
    """Time every subsequence length and the unsplit call in turns."""
    sides = _sides(problem, lengths)
    seconds: dict[int, list[tuple[float, float]]] = {tokens: [] for tokens in sides}
    for turn in range(turns + 1):
        for tokens, side in sides.items():
            times = side()
            if turn:
                seconds[tokens].append(times)
    return [_times(problem, tokens, seconds[tokens], seconds[UNSPLIT]) for tokens in lengths]


def _times(
    problem: Problem,
    tokens: int,
    ours: list[tuple[float, float]],
    unsplit: list[tuple[float, float]],
) -> Times:
    pairs = list(zip(ours, unsplit, strict=True))
    return Times(
        problem,
        tokens,
        forward_s=statistics.median(forward for forward, _ in ours),
        backward_s=statistics.median(backward for _, backward in ours),
        forward_ratio=statistics.median(a[0] / b[0] for a, b in pairs),
        backward_ratio=statistics.median(a[1] / b[1] for a, b in pairs),
        both_ratio=statistics.median(sum(a) / sum(b) for a, b in pairs),
    )


def _sides(problem: Problem, lengths: list[int]) -> dict[int, Side]:
    generator = torch.Generator().manual_seed(0)

    def random(heads: int) -> Tensor:
        shape = (problem.length, heads, problem.head_size)
        return torch.randn(shape, generator=generator).to(DTYPES[problem.dtype])

    do, q = random(problem.heads), random(problem.heads)
    k, v = random(problem.kv_heads), random(problem.kv_heads)
    sides = {UNSPLIT: _unsplit(do, q, k, v)}
    return sides | {tokens: _in_subsequences(do, q, k, v, tokens) for tokens in lengths}


def _unsplit(do: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Side:
    group = q.shape[1] // k.shape[1]
    q, k, v, do = (
        x.repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1).contiguous()[None]
        for x in (q, k, v, do)
    )
    assert k.shape == q.shape, f"{group} query heads share a key head"
    leaves = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())

    def both() -> tuple[float, float]:
        start = time.perf_counter()
        o = functional.scaled_dot_product_attention(*leaves, is_causal=True)
        middle = time.perf_counter()
        torch.autograd.grad(o, leaves, do)
        return middle - start, time.perf_counter() - middle

    return both


def _in_subsequences(do: Tensor, q: Tensor, k: Tensor, v: Tensor, tokens: int) -> Side:
    length = q.shape[0]
    spans = [(a, min(a + tokens, length)) for a in range(0, length, tokens)]
    stored_k, stored_v = (empty_keys(*x.shape, dtype=x.dtype, device="cpu") for x in (k, v))
    dk, dv = (empty_keys(*x.shape, dtype=torch.float32, device="cpu") for x in (k, v))

    @torch.no_grad()
    def both() -> tuple[float, float]:
        dk.zero_(), dv.zero_()
        start = time.perf_counter()
        outputs = []
        for a, b in spans:
            stored_k[a:b].copy_(k[a:b]), stored_v[a:b].copy_(v[a:b])
            outputs.append(attention_forward(q[a:b], stored_k[:b], stored_v[:b]))
        middle = time.perf_counter()
        for (a, b), (o, lse) in zip(reversed(spans), reversed(outputs), strict=True):
            keys, values = stored_k[:b], stored_v[:b]
            dk_b, dv_b = dk[:b], dv[:b]
            attention_backward(do[a:b], q[a:b], keys, values, o, lse, dk_TKD=dk_b, dv_TKD=dv_b)
        return middle - start, time.perf_counter() - middle

    return both


def _print(found: list[Times]) -> None:
    p = found[0].problem
    print(
        f"{p.length} tokens, {p.heads} heads of {p.head_size} on {p.kv_heads}, {p.dtype}: "
        "time relative to one unsplit call"
    )
    print(f"  {'subsequence':>11}  {'forward':>8}  {'backward':>8}  {'both':>8}")
    for t in found:
        print(
            f"  {t.tokens:>11}  {t.forward_ratio:>7.3f}x  {t.backward_ratio:>7.3f}x  "
            f"{t.both_ratio:>7.3f}x",
            flush=True,
        )


def _write(path: Path, found: list[Times], *, threads: int) -> None:
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()} CPU, {threads} threads",
        "torch": torch.__version__,
        "command": shlex.join(["python", *sys.argv]),
        "comparisons": [asdict(times) for times in found],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
