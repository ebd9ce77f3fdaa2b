"""Golden answers about runs: what ``sppo`` solves, estimates and trains, and short losses.

Everything is asked of the command line, which is a contract, but the short losses, which
:mod:`tests.random_training` computes with the engine on emulated ranks.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

from tests.conftest import call, write_run, write_tokens
from tests.goldens.programs import digest
from tests.random_training import case as cases
from tests.random_training.oracle import first_state
from tests.random_training.run_leg import run_leg
from tests.random_training.training import emulated

Answer = dict[str, Any]
"""Values of JSON by name."""

RUN = {
    "model": {"preset": "tiny"},
    "data": {"tokens": "data"},
    "sequence": {"length": "16Ki"},
    "hardware": {"preset": "h100"},
}
"""Run file that the words of a request change."""

_CHOICES = ("virtual_stages", "num_subsequences", "schedule", "policy", "kv", "state")


def requests() -> dict[str, bool]:
    """Return the requests of ``sppo solve``, and whether each is left to the exhaustive tier."""
    lines = Path(__file__).with_name("requests.txt").read_text(encoding="utf-8").splitlines()
    words = [line for line in lines if line and not line.startswith("#")]
    return {line.removeprefix("slow "): line.startswith("slow ") for line in words}


def solution(request: str) -> Answer:
    """Return what ``sppo solve`` chooses for a request, and the program and time of its plan."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("run.yaml").write_text(json.dumps(RUN), encoding="utf-8")
        result = call("solve", "run.yaml", *request.split(), "--json", "-o", "plan.json")
        assert result.exit_code in (0, 3), result.output
        found = json.loads(result.stdout)
        answer = {"exit_code": result.exit_code, "rejected": len(found["rejected"])}
        if not found["feasible"]:
            nearest = found["nearest"]
            return answer | {"nearest": nearest and nearest["reason"], "advice": found["advice"]}
        simulated = call("simulate", "plan.json", "--json", "--write-program", "program.txt")
        assert simulated.exit_code == 0, simulated.output
        best = found["best"]
        return {
            **answer,
            **{axis: best[f"{axis}_parallel_degree"] for axis in ("data", "pipeline", "sequence")},
            **_choices(best.get("longest_sample", best)),
            "step_s": best["predicted"]["step_s"] if "predicted" in best else best["step_s"],
            "simulated_s": json.loads(simulated.stdout)["makespan_s"],
            "program": digest(Path("program.txt").read_text(encoding="utf-8")),
            "memory": _memory(best.get("stages") or [best["memory"]]),
        }


def memory(words: str) -> Answer | None:
    """Return what ``sppo estimate`` predicts for the run with these words; None if it refuses."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("run.yaml").write_text(json.dumps(RUN), encoding="utf-8")
        result = call("estimate", "run.yaml", *words.split(), "--json")
    if result.exit_code == 2:
        return None
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    by_rank = {stage["rank"]: stage["device_bytes"] for stage in found["stages"]}
    return {
        **_choices(found),
        "fits": found["fits"],
        "memory": _memory(found["stages"]),
        "device_bytes": [by_rank[rank] for rank in sorted(by_rank)],
        "host_peak_bytes": found["host_peak_bytes"],
    }


def short_losses(written: str) -> Answer:
    """Return losses and gradient norms of a training on emulated ranks.

    Args:
        written: Training of one leg as it is printed, ``Case(seed=0, ...)``. A drawn one would be
            another as soon as more is drawn.
    """
    case = eval(written, vars(cases))
    leg = case.legs[0]
    with tempfile.TemporaryDirectory() as disk:
        state = first_state(case)
        steps = emulated(case)(run_leg, case, 0, state, disk, ranks=leg.num_ranks)[0]
    return {
        "dtype": case.dtype,
        "losses": [step.loss for step in steps],
        "norms": [step.norm for step in steps],
    }


def trained_losses(words: str) -> Answer:
    """Return the losses that ``sppo train`` records with these words, on a CPU."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        write_tokens(Path("tokens"), documents=[100, 130, 400, 900])
        write_run(Path("run.yaml"))
        result = call("train", "run.yaml", *words.split())
        assert result.exit_code == 0, result.output
        lines = Path("out/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {"dtype": "fp32", "losses": [json.loads(line)["loss"] for line in lines]}


def _choices(found: Answer) -> Answer:
    return {name: found[name] for name in _CHOICES if name in found}


def _memory(stages: list[Answer]) -> Answer:
    """Return the bytes of the fullest rank by bucket, without empty buckets."""
    fullest = max(stages, key=lambda stage: stage["device_bytes"])
    elsewhere = {name: value for name, value in fullest.items() if name.endswith("_bytes")}
    return {name: value for name, value in (fullest["device"] | elsewhere).items() if value}
