"""Training time that stops, saves and restarts leave of jobs on 8 to 16 384 GPUs.

The jobs are planned, with analytic rates and simulated steps; then stops are drawn, with published
rates, and the steps that checkpoints keep are counted. Nothing is trained. Automatic checkpoints
have the interval that training has.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments import harness
from sppo.api import find_solution
from sppo.config import load_run
from sppo.planning.effective_time import EffectiveTime, effective_time
from sppo.planning.search.solver import Solution
from sppo.units import format_duration

_RUN = "configs/run/llama_8b_1m_1node.yaml"
_70B = "model.preset=llama-3.1-70b hardware.preset=h100"
_405B = (
    f"{_70B} model.num_layers=126 model.hidden_size=16384 model.num_heads=128 "
    "model.mlp_size=53248 sequence.length=128Ki hardware.nodes=2048 train.sequences_per_step=128"
)
JOBS = {
    "8: Llama-3.1-8B, 128Ki tokens": "hardware.preset=h100 sequence.length=128Ki",
    "8: Llama-3.1-8B, 1Mi tokens": "",
    "128: Llama-3.1-70B, 2 x 1Mi": f"{_70B} hardware.nodes=16 train.sequences_per_step=2",
    "1024: Llama-3.1-70B, 16 x 1Mi": f"{_70B} hardware.nodes=128 train.sequences_per_step=16",
    "16384: Llama-3.1-405B, 128 x 128Ki": _405B,
}
"""Overrides of each job, by its GPUs, model and step."""
RATES = {
    "Llama 3": "hardware.mean_time_to_failure=null",
    "research clusters": "hardware.mean_time_to_failure=29491h",
}
"""Override of each published rate: 419 stops in 54 days on 16 384 GPUs (arXiv:2407.21783) and one
other stop a day; 1.8 hours between the stops of 16 384 GPUs (arXiv:2410.21680)."""
EVERY = ("auto", 10, 100)
_DRAWN_JOBS, _STOPS = 100, 2000


def effective(options: argparse.Namespace) -> dict[str, Any]:
    """Return the table of effective training time, and print it."""
    rows: list[dict[str, Any]] = []
    for name, words in JOBS.items():
        solution = find_solution(load_run(_RUN, words.split()))
        assert isinstance(solution, Solution), "a stream"
        rows += [row(name, words, rate, solution, options.restart_s) for rate in RATES]
        print(f"planned: {name}", flush=True)
    harness.print_table(
        ["GPUs and job", "rate", "stop every", "step", "save", *map(_heading, EVERY)],
        [
            [
                one["job"],
                one["rate"],
                *(format_duration(one[key]) for key in ("between_stops_s", "step_s", "save_s")),
                *(_cell(one["every"][str(every)]) for every in EVERY),
            ]
            for one in rows
        ],
    )
    return {"restart_s": options.restart_s, "stops": _DRAWN_JOBS * _STOPS, "rows": rows}


def row(name: str, words: str, rate: str, solution: Solution, restart_s: float) -> dict[str, Any]:
    """Return the effective training time of one job at one rate, by the steps between saves."""
    assert solution.best is not None, "find_solution raises if nothing fits"
    step_s, devices = solution.best.step_s, solution.best.degrees.num_devices
    found: dict[str, Any] = {"job": name, "overrides": words, "rate": rate, "devices": devices}
    by_interval = {}
    for every in EVERY:
        run = load_run(_RUN, [*words.split(), RATES[rate], f"checkpoint.every={every}"])
        predicted = effective_time(
            run,
            hardware=solution.hardware,
            num_devices=devices,
            step_s=step_s,
            restart_s=restart_s,
        )
        assert predicted is not None, "a run with checkpoints"
        by_interval[str(every)] = {
            "interval_s": predicted.interval_s,
            "predicted": predicted.shares.effective,
            **simulated(predicted),
        }
        found |= {
            "between_stops_s": predicted.between_stops_s,
            "step_s": step_s,
            "save_s": predicted.save_s,
        }
    return {**found, "every": by_interval}


def simulated(times: EffectiveTime) -> dict[str, float]:
    """Return the shares of the time of drawn jobs, and the standard error of the effective one."""
    draws = np.random.default_rng(0)
    between_s = draws.exponential(times.between_stops_s, size=(_DRAWN_JOBS, _STOPS))
    whole_s, trained_s = between_s.sum(axis=1), np.maximum(0, between_s - times.restart_s)
    saves = np.floor(trained_s / (times.interval_s + times.save_s)).sum(axis=1)
    effective = saves * times.interval_s / whole_s
    saving = saves * times.save_s / whole_s
    restarting = np.minimum(between_s, times.restart_s).sum(axis=1) / whole_s
    return {
        "effective": effective.mean(),
        "standard_error": effective.std() / np.sqrt(_DRAWN_JOBS),
        "saving": saving.mean(),
        "restarting": restarting.mean(),
        "lost": (1 - effective - saving - restarting).mean(),
    }


def _heading(every: object) -> str:
    return "automatic" if every == "auto" else f"every {every} steps"


def _cell(one: Mapping[str, float]) -> str:
    return f"{one['effective']:.1%} ({format_duration(one['interval_s'])})"
