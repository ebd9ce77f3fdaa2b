"""What moves, is cut or is computed again leaves training as it is, bit for bit, and as planned.

Each run is compared with one that keeps everything on the device.
"""

import contextlib
import json
from functools import cache

import pytest
import torch

from sppo.checkpoint.checkpoint import read_weights
from sppo.config import load_run
from sppo.training.devices.cpu_device import CpuDevice
from tests.conftest import write_run, write_tokens
from tests.fake_cuda import fake_gpu, steps_lock_nothing
from tests.tiers import exhaustive
from tests.training.jobs import losses, records, summary, train_alone

MODEL = {"preset": "tiny-test", "vocab_size": 32, "num_layers": 3}
DISK = {"activations.disk": "spill"}
STAGES = {"parallel.virtual_stages": 3, "activations.policy": "keep_attention"}
ALL = ("weights", "gradients", "optimizer")


def state(tier, *parts):
    return {f"state.{part}": tier for part in parts}


ON_CPU = {
    "recomputed": {"activations.policy": "recompute"},
    "offload all": {**DISK, "activations.policy": "offload_all", "activations.debug": True},
    "offload a ratio": {**DISK, "activations.offload_ratio": 0.6},
    "stages, K/V retained": {**STAGES, "activations.kv": "retain"},
    "stages, K/V recomputed": {**STAGES, "activations.kv": "recompute"},
    "stages, K/V on a disk": {**STAGES, **DISK, "activations.kv": "offload"},
    "optimizer on a disk": {**DISK, **state("disk", "optimizer")},
    "state on a disk": {**DISK, **STAGES, **state("disk", *ALL), "activations.kv": "retain"},
}
ON_GPU = {
    "gpu, offload to host": {"activations.policy": "offload_all", "activations.debug": True},
    "gpu, offload to a disk": {
        **DISK,
        "activations.policy": "offload_all",
        "activations.tier": "disk",
    },
    "gpu, optimizer in host": {"state.optimizer": "host"},
    "gpu, all in host and on a disk": {
        **DISK,
        **STAGES,
        **state("host", *ALL),
        "activations.policy": "offload_all",
        "activations.kv": "offload",
        "activations.tier": "disk",
    },
}
SELDOM = {
    "gradients on a disk": {**DISK, **STAGES, **state("disk", "gradients")},
    "weights on a disk": {**DISK, **STAGES, **state("disk", "weights")},
}
"""Those that are left to the exhaustive tier."""
RUNS = {**ON_CPU, **ON_GPU, **SELDOM}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Function that returns the directory of a run that keeps everything, in a data type."""

    @cache
    def directory(dtype):
        found = tmp_path_factory.mktemp(dtype)
        write_tokens(found / "tokens")
        write_run(
            found / "run.yaml",
            model=MODEL,
            optimizer={"schedule": "constant"},
            train={"dtype": dtype, "steps": 3},
        )
        (found / "spill").mkdir()
        with contextlib.chdir(found):
            train_alone(load_run("run.yaml", ["activations.policy=retain"]), reports=True)
        return found

    return directory


def assert_same_model(one, other):
    first, second = read_weights(one)[1], read_weights(other)[1]
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", [*ON_CPU, *ON_GPU, *exhaustive(*SELDOM)])
def test_training_is_that_of_keeping_everything(kept, monkeypatch, name):
    on_gpu = name.startswith("gpu")
    plain = kept("fp32" if "ratio" in name or "recomputed" in name else "bf16")
    monkeypatch.chdir(plain)
    keys = {**RUNS[name], "train.output": name}
    run = load_run("run.yaml", [f"{key}={value}" for key, value in keys.items()])
    with contextlib.ExitStack() as stack:
        device = CpuDevice()
        if on_gpu:
            device, runtime = stack.enter_context(fake_gpu())
            stack.enter_context(steps_lock_nothing(runtime))
        outcome = train_alone(run, device=device, reports=True)
        if on_gpu:
            assert runtime.locked_sizes
            assert runtime.locked == set()
    assert losses(plain / name) == losses(plain / "out")
    assert_same_model(plain / name, plain / "out")
    assert list((plain / "spill").iterdir()) == []
    plan = json.loads((plain / name / "plan.json").read_text())
    assert plan["virtual_stages"] == len(plan["stages"]) == keys.get("parallel.virtual_stages", 1)
    asked = {part for part in ALL if f"state.{part}" in keys}
    moved = {part for part, tier in plan["state"].items() if tier != "device"}
    assert moved == (asked | {"optimizer"} if "optimizer" in name or asked else set())
    told = summary(plain / name)
    if not on_gpu:  # what torch says of a GPU's memory is made up
        for bucket in ("weights", "gradients", "optimizer", "K/V and gradients", "activations"):
            # Parameters without weight decay are in buckets of their own.
            pair = told["memory_bytes"][bucket]
            assert pair["measured"] == pytest.approx(pair["predicted"], rel=0.01), bucket
    copies = told["copies"]
    assert all(
        (step["offloaded_bytes"] > 0) == (copies is not None) for step in records(plain / name)
    )
    if copies is not None:
        assert copies["out_bytes"] == copies["back_bytes"]
        assert outcome.buckets.copies_bytes > 0
        for place in ("host_bytes", "disk_bytes"):
            assert copies[place]["measured"] == copies[place]["predicted"]
        assert (copies["host_bytes"]["measured"] > 0) == on_gpu
        assert (copies["disk_bytes"]["measured"] > 0) == ("activations.disk" in keys)
    timeline = told["timeline"]
    assert 0 < timeline["with_measured_compute_s"] <= timeline["makespan_s"]["measured"] * 1.000001


@pytest.mark.exhaustive
@pytest.mark.parametrize("tiers", [("disk", "device"), ("device", "disk")])
def test_a_run_goes_on_with_its_state_elsewhere(kept, monkeypatch, tiers):
    """Its first step on the disk, the others on the device, or the other way round."""
    plain = kept("bf16")
    monkeypatch.chdir(plain)
    output = "-".join(tiers)
    for steps, tier in zip((1, 3), tiers, strict=True):
        keys = {**DISK, **STAGES, "activations.kv": "retain", "train.output": output}
        keys |= {"train.steps": steps, **(state("disk", *ALL) if tier == "disk" else {})}
        train_alone(load_run("run.yaml", [f"{key}={value}" for key, value in keys.items()]))
    assert losses(plain / output) == losses(plain / "out")
    assert_same_model(plain / output, plain / "out")
