"""Small runs on GPUs and their plans, one for each kind of data that moves between streams."""

from __future__ import annotations

from typing import Any

from sppo.config import RunConfig
from sppo.hardware.description import HardwareSpec
from sppo.hardware.run_hardware import hardware_for
from sppo.planning.plan import ExecutionPlan
from sppo.planning.run_plan import plan_run
from sppo.units import GIB
from tests.planning.cases import run_config

MODEL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_size": 96,
}
_TWO_STAGES = {"pipeline_parallel_degree": 2, "schedule": "sppo"}
CASES: dict[str, dict[str, Any]] = {
    "to the host": {"activations": {"policy": "offload_all"}},
    "to a disk": {"activations": {"policy": "offload_all", "tier": "disk", "disk": "."}},
    "K/V to the host": {
        "parallel": {"virtual_stages": 2},
        "activations": {"policy": "offload_all", "kv": "offload"},
        "model": {**MODEL, "num_layers": 4},
    },
    "K/V to a disk": {
        "parallel": {"virtual_stages": 2},
        "activations": {"policy": "offload_all", "kv": "offload", "tier": "disk", "disk": "."},
        "model": {**MODEL, "num_layers": 4},
    },
    "optimizer on the host": {"state": {"optimizer": "host"}},
    "state on the host": {
        "parallel": {"virtual_stages": 4},
        "state": {"weights": "host", "gradients": "host"},
        "model": {**MODEL, "num_layers": 4},
    },
    "shards on the host": {
        "parallel": {"virtual_stages": 2, "data_parallel_degree": 2, "zero": 3},
        "state": {"weights": "host", "gradients": "host"},
        "train": {"sequences_per_step": 4},
    },
    "pipeline": {"parallel": _TWO_STAGES},
    "deferred weight halves": {
        "parallel": {**_TWO_STAGES, "schedule": "seq_zb_h1"},
        "activations": {"policy": "offload_all"},
        "train": {"sequences_per_step": 2},
    },
    "ulysses": {"parallel": {"sequence_parallel_degree": 2}},
    "megatron": {
        "parallel": {"sequence_parallel_degree": 2, "sequence_parallel": "megatron"},
    },
    "zero 1": {
        "parallel": {"data_parallel_degree": 2, "zero": 1},
        "train": {"sequences_per_step": 2},
    },
    "zero 3": {
        "parallel": {"data_parallel_degree": 2, "zero": 3},
        "train": {"sequences_per_step": 2},
    },
    "multiplexed": {
        "parallel": {**_TWO_STAGES, "schedule": "sppo_msp"},
        "activations": {"policy": "offload_all"},
    },
    "multiplexed, looped": {
        "parallel": {**_TWO_STAGES, "schedule": "sppo_msp", "virtual_stages": 2},
        "activations": {"policy": "offload_all"},
        "model": {**MODEL, "num_layers": 4},
    },
}
"""Sections of run files by name."""


def small_run(preset: str = "h100", **sections: Any) -> RunConfig:
    """A run of :data:`MODEL` with 4 subsequences of 64 tokens."""
    every: dict[str, Any] = {
        "activations": {"policy": "keep_attention"},
        "sequence": {"num_subsequences": 4},
        "hardware": {"preset": preset},
        **sections,
    }
    parallel = {"data_parallel_degree": 1, "pipeline_parallel_degree": 1}
    parallel |= {"sequence_parallel_degree": 1, **sections.get("parallel", {})}
    model = every.pop("model", MODEL)
    return run_config(model, length=256, **{**every, "parallel": parallel})


def plan_for_gpu(run: RunConfig, *, hardware: HardwareSpec | None = None) -> ExecutionPlan:
    """The plan that training would make on the GPU that a run names, or on another."""
    hardware = hardware or hardware_for(run.hardware)
    return plan_run(
        run,
        hardware=hardware,
        available_bytes=hardware.device.usable_bytes,
        disk_bytes=GIB,
        host_bytes=256 * GIB,
    )


def planned(name: str) -> tuple[RunConfig, ExecutionPlan]:
    """One of :data:`CASES`, and its plan."""
    run = small_run(**CASES[name])
    return run, plan_for_gpu(run)
