"""Rates of the gated delta rule: FLOPs per second of its products, and seconds of a scan's chunk.

Few heads and many are timed, forward alone and with backward. A scan takes as long for many heads
as for few, so the difference is that of products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal, get_args

import numpy as np
import torch
from torch.nn import functional

from sppo.bench.operands import DTYPES, Operands
from sppo.bench.timing import Call, KernelBench, Timing
from sppo.config.model import LinearAttention
from sppo.cost.flops import BACKWARD_RATIO
from sppo.cost.linear_attention.delta_rule import rule_flops
from sppo.cost.tiles import CHUNK_TOKENS
from sppo.kernels.chunked_rule import RuleOperands
from sppo.kernels.delta_rule import delta_rule

Passes = Literal["forward", "forward and backward"]
RuleKey = tuple[int, int, Passes]
"""(tokens, heads, passes)."""

_TOKENS = {"cpu": 512, "cuda": 8192}
_QUICK_TOKENS = {"cpu": 128, "cuda": 2048}
_HEADS = {"cpu": (1, 4), "cuda": (8, 32)}
_SIZE = 128
"""Size of keys and values, as in published models."""
_LEAST_S_PER_FLOP = 1e-15
"""Seconds of a FLOP where heads take no time beside the scan, as few heads on an idle GPU."""


@dataclass(frozen=True, slots=True)
class RuleRates:
    """Rates of the gated delta rule, as in :class:`sppo.hardware.description.DeviceSpec`."""

    rule_flops_per_s: float
    rule_step_s: float


def measure_rule(bench: KernelBench, *, quick: bool) -> RuleRates:
    """Return the rates in the first dtype of a benchmark, on fewer tokens if ``quick``."""
    operands, dtype = bench.operands, DTYPES[bench.dtypes[0]]
    tokens = (_QUICK_TOKENS if quick else _TOKENS)[operands.device]
    cases = {
        (tokens, heads, passes): partial(_make, operands, dtype, tokens, heads, passes)
        for heads, passes in product(_HEADS[operands.device], get_args(Passes))
    }
    return rule_rates(bench.time("delta rule", cases))


def rule_rates(timings: Mapping[RuleKey, Timing]) -> RuleRates:
    """Return the rates whose predictions of all timings have the least relative errors."""
    rows = []
    for (tokens, heads, passes), timing in timings.items():
        runs, scans = (1, 1) if passes == "forward" else (1 + BACKWARD_RATIO, 2)
        one = LinearAttention(key_heads=1, value_heads=1, key_size=_SIZE, value_size=_SIZE)
        flops = runs * tokens * heads * rule_flops(one)
        rows.append(np.array([flops, scans * tokens / CHUNK_TOKENS]) / timing.median_s)
    scale = np.max(rows, axis=0)
    solution, *_ = np.linalg.lstsq(np.array(rows) / scale, np.ones(len(rows)), rcond=None)
    flop_s, step_s = (solution / scale).tolist()
    return RuleRates(1 / max(flop_s, _LEAST_S_PER_FLOP), max(step_s, 0.0))


def _make(operands: Operands, dtype: torch.dtype, tokens: int, heads: int, passes: Passes) -> Call:
    operands.begin()
    q, k, v = (operands.take(tokens, heads, _SIZE, dtype=dtype) for _ in range(3))
    decay, share = (operands.take(tokens, heads, dtype=torch.float32) for _ in range(2))
    state = operands.zeros(heads, _SIZE, _SIZE, dtype=torch.float32)
    q, k = (functional.normalize(x, dim=-1) for x in (q, k))
    rule = RuleOperands(q, k, v, -decay.abs(), share.sigmoid(), state)
    if passes == "forward":
        return lambda: delta_rule(rule)
    leaves = [x.requires_grad_() for x in rule[:5]]

    def both() -> None:
        with torch.enable_grad():
            o, _ = delta_rule(rule)
            torch.autograd.grad(o, leaves, v.detach())

    return both
