"""Golden answers about runs: what ``sppo`` solves, estimates and trains, and short losses.

Everything is asked of the command line, which is a contract, but the short losses, which
:mod:`tests.random_training` computes with the engine on emulated ranks.
"""

from __future__ import annotations

import json
import random
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

from tests.conftest import call, write_run, write_tokens
from tests.goldens.programs import SCHEDULES, WHOLE_SEQUENCES, WITH_VIRTUAL_STAGES, digest
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

TRAINED = (
    "train.steps=4",
    "activations.policy=recompute train.sequences_per_step=2",
    "activations.policy=offload_all activations.disk=.",
    "state.optimizer=disk activations.disk=.",
    "data.samples=documents sequence.num_subsequences=auto train.samples_per_step=4",
    "model.num_layers=2 parallel.virtual_stages=2 parallel.schedule=looped_bfs",
)
"""Words of the runs that are trained."""

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


_RARE_WORDS = {
    "parallel.zero": ("0", "2", "3"),
    "parallel.sequence_parallel": ("megatron",),
    "activations.kv": ("offload", "recompute", "retain"),
    "activations.input_every": ("2", "4"),
    "state.weights": ("host",),
    "state.gradients": ("host",),
    "state.optimizer": ("host",),
    "train.dtype": ("fp32",),
    "checkpoint.async_save": ("true",),
}
_GRIDS = ((1, 1, 1), (1, 1, 4), (2, 1, 2), (1, 2, 1), (1, 2, 2), (1, 4, 2), (2, 2, 2), (4, 2, 1))


def drawn_run(seed: int) -> str:
    """Return the words of a run that may be refused: model, degrees, schedule, policy, tiers."""
    dice = random.Random(seed)
    data, pipeline, group = dice.choice(_GRIDS)
    schedule = dice.choice((*SCHEDULES, *["looped_bfs"] * 5))
    words = {
        "model.preset": dice.choice(("llama-3.2-1b", "qwen3-0.6b", "mistral-7b", "gpt-7b", "tiny")),
        "sequence.length": dice.choice(("8Ki", "30000", "64Ki", "256Ki")),
        "hardware.preset": dice.choice(("a100-80g", "h100", "h200", "laptop-cpu")),
        "hardware.devices_per_node": data * pipeline * group,
        "parallel.data_parallel_degree": data,
        "parallel.pipeline_parallel_degree": pipeline,
        "parallel.sequence_parallel_degree": group,
        "parallel.schedule": schedule,
        "parallel.virtual_stages": dice.choice((2, 4)) if schedule in WITH_VIRTUAL_STAGES else 1,
        "sequence.num_subsequences": 1 if schedule in WHOLE_SEQUENCES else dice.choice((1, 5, 16)),
        "train.sequences_per_step": data * dice.choice((1, 1, 3)),
        "activations.policy": dice.choice(("auto", "retain", "recompute", "sppo", "hybrid")),
    }
    words |= {key: dice.choice(some) for key, some in _RARE_WORDS.items() if dice.random() < 0.2}
    return " ".join(f"{key}={value}" for key, value in words.items())


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
