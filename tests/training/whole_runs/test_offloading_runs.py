"""Runs that offload to a disk: what is refused before the start, and disks that are bad."""

import errno
import os
from unittest import mock

import pytest

from sppo.config import load_run
from sppo.kernels.native.machine_memory import MemoryRoom
from sppo.offload import state_memory
from sppo.offload.disk import disk_room as disk
from sppo.offload.disk import file_tier
from sppo.offload.disk.disk_room import DiskRoom
from sppo.planning.run_plan import USABLE_FRACTION
from sppo.training import preflight as preflight_module
from sppo.training import trainer
from sppo.training.preflight import preflight
from tests.conftest import call, refuse, succeed, write_run
from tests.tiers import exhaustive
from tests.training.jobs import job_alone, losses, records

MODEL = {"preset": "tiny-test", "vocab_size": 32, "num_layers": 3}
BLOCKS_OF_A_STEP = 2 * 4
"""K and V of two of three layers, of four subsequences."""
KV = {"kv": "offload", "policy": "keep_attention"}
STATE = {"weights": "disk", "gradients": "disk", "optimizer": "disk"}


@pytest.fixture(autouse=True)
def _spill(work):
    (work / "spill").mkdir()


def run_of(
    work, output="out", *, stages=1, state=None, sequence=None, parallel=None, **activations
):
    sections = {} if sequence is None else {"sequence": sequence}
    return write_run(
        work / f"{output}.yaml",
        model=MODEL,
        parallel={"virtual_stages": stages, **(parallel or {})},
        activations={"disk": "spill", **activations},
        state=state or {},
        train={"output": output},
        **sections,
    )


def planned(run_file):
    return preflight(job_alone(load_run(run_file))).plan


def set_disk(monkeypatch, free_bytes):
    monkeypatch.setattr(disk, "disk_room", lambda directory: DiskRoom(free_bytes=free_bytes))


# Before the start


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"disk": "nowhere"}, "activations.disk=nowhere: no such directory; make it"),
        ({"disk": "run.yaml"}, "activations.disk=run.yaml: not a directory"),
        ({"disk": None, "policy": "sppo"}, "name a disk directory (activations.disk)"),
        ({"disk": None, "offload_ratio": 0.5}, "name a disk directory (activations.disk)"),
        ({"disk": None, "tier": "disk"}, "has no disk memory that may be used"),
        ({"tier": "host"}, "has no host memory that may be used"),
        ({"stages": 3, "disk": None, "kv": "offload"}, "no tier to offload K and V to"),
        ({"stages": 3, "kv": "recompute", "input_every": 2}, "write activations.input_every=1"),
        ({"stages": 9}, "there are 3"),
        ({"kv": "recompute"}, "uses K and V of all layers at once"),
        (
            {"stages": 3, "kv": "recompute", "parallel": {"schedule": "interleaved_seq1f1b"}},
            "uses K and V of several stages at once",
        ),
        ({"stages": 3, "state": {**STATE, "optimizer": "device"}}, "state.optimizer=disk"),
        ({"stages": 3, "state": {**STATE, "gradients": "host"}}, "one tier"),
        ({"state": {"weights": "disk"}}, "stage by stage"),
        ({"disk": None, "state": {"optimizer": "disk"}}, "activations.disk=DIR"),
        (
            {
                "state": {"gradients": "disk"},
                "parallel": {"multiplexed": "on", "virtual_stages": "auto"},
            },
            "share units",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(work, keys, says):
    assert says in " ".join(refuse("train", run_of(work, **keys)).split())
    assert not (work / "out").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_refused(work):
    (work / "spill").chmod(0o500)
    error = refuse("train", run_of(work, policy="offload_all"))
    assert "no file can be made there (Permission denied)" in error


def test_a_file_system_in_memory_counts_as_memory(work, monkeypatch):
    run_file = run_of(work, policy="offload_all")
    needed = planned(run_file).stages[0].memory
    monkeypatch.setattr(preflight_module, "is_memory", lambda directory: True)
    planned(run_file)
    room = needed.device.total_bytes + needed.tier_activations_bytes
    monkeypatch.setattr(
        "sppo.training.devices.cpu_device.memory_room", lambda: MemoryRoom(room - 1)
    )
    error = refuse("train", run_file, code=4)
    assert "activations.disk=spill is a file system in memory" in error


def test_what_is_too_much_for_a_small_disk_is_named(work, monkeypatch):
    set_disk(monkeypatch, 150_000)
    keys = {"kv": "offload", "policy": "offload_all", "stages": 3}
    error = refuse("train", run_of(work, **keys), code=4)
    assert "error: offloaded activations 272.0 KiB need more of activations.disk=spill" in error
    assert "a lower activations.offload_ratio or activations.kv=retain" in error
    less = {**keys, "policy": "auto", "offload_ratio": 0.2}
    assert planned(run_of(work, **less)).offloads_anything


def test_a_disk_too_small_for_keys_is_refused(work, monkeypatch):
    set_disk(monkeypatch, 20_000)
    error = refuse("train", run_of(work, stages=3, **KV), code=4)
    assert "activations.kv=retain" in error
    assert planned(run_of(work, stages=3, **{**KV, "kv": "recompute"}))


@pytest.mark.parametrize(
    "activations",
    [{"policy": "offload_all"}, *exhaustive({"offload_ratio": 0.5}, {"tier": "disk"})],
)
def test_a_full_disk_is_not_called_missing(work, monkeypatch, activations):
    set_disk(monkeypatch, 0)
    error = refuse("train", run_of(work, **activations), code=4)
    assert "activations.disk=spill: the disk is full; free space" in error
    assert not planned(run_of(work)).offloads_anything


def test_a_disk_without_room_for_the_state_is_refused(work, monkeypatch):
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with monkeypatch.context() as patch:
        patch.setattr(state_memory.os, "posix_fallocate", full)
        text = refuse("train", run_of(work, stages=3, state=STATE), code=4)
    assert "activations.disk=spill: no room for" in text
    assert "state.weights" in text
    assert not os.listdir(work / "spill")
    few = DiskRoom(free_bytes=1000)
    monkeypatch.setattr(preflight_module, "usable_directory", lambda directory: few)
    text = refuse("train", run_of(work, "other", stages=3, state=STATE), code=4)
    assert "optimizer states 350.6 KiB, gradients 116.9 KiB" in text
    assert "activations.disk=spill" in text
    assert not (work / "other").exists()


# Plans


def test_a_plan_that_moves_is_followed_on_its_kind_of_device(work):
    """Made by the solver for a machine with too little memory to keep everything."""
    run_file = run_of(work, offload_ratio=0.5)
    succeed("solve", run_file, "-o", "plan.json")
    succeed("train", run_file, "--plan", "plan.json")
    assert records(work / "out")[0]["offloaded_bytes"] > 0
    gpu = ("hardware.preset=h100", "hardware.devices_per_node=1", "train.output=gpu")
    succeed("solve", run_file, *gpu, "-o", "gpu.json")
    error = refuse("train", run_file, *gpu, "--plan", "gpu.json")
    assert "write hardware.preset=laptop-cpu to train on the CPU" in error
    assert not (work / "gpu").exists()


def test_hybrid_moves_what_does_not_fit(work, monkeypatch):
    """Memory for two thirds of what is saved: some is offloaded, nothing recomputed."""
    long = {"length": 512, "num_subsequences": 16}
    device = planned(run_of(work, sequence=long, policy="retain")).stages[0].memory.device
    usable = device.total_bytes - device.activations_bytes // 3
    room = MemoryRoom(int(usable / USABLE_FRACTION) + 1)
    monkeypatch.setattr("sppo.training.devices.cpu_device.memory_room", lambda: room)
    monkeypatch.setattr(preflight_module, "REPORT_BYTES", 0)  # plots would need more than this run
    run_file = run_of(work, sequence=long)
    plan = planned(run_file)
    assert plan.policy == "hybrid"
    assert plan.predicted.device_peak_bytes <= usable
    assert not any(any(part.recomputed) for part in plan.stages[0].subsequences)
    succeed("train", run_file, "train.steps=1")
    assert 0 < records(work / "out")[0]["offloaded_bytes"] < device.activations_bytes


# During the run


@pytest.mark.parametrize("verb", ["writing", *exhaustive("reading")])
def test_a_disk_that_fails_ends_the_run_and_the_next_goes_on(work, monkeypatch, verb):
    """The first step that is lost is the one under way: the third, behind a checkpoint."""
    succeed("train", run_of(work, "plain", policy="keep_attention"))
    run_file, calls = run_of(work, stages=3, **KV), 0
    original = file_tier._system_io

    def failing(file, write, memory, offset_bytes):
        nonlocal calls
        calls += write == (verb == "writing")
        if calls > 2 * BLOCKS_OF_A_STEP + 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(file, write, memory, offset_bytes)

    monkeypatch.setattr(trainer, "warm_up", lambda run, **_: None)  # a step of another model
    monkeypatch.setattr(file_tier, "_system_io", failing)
    ended = call("train", run_file, "checkpoint.every=1")
    assert ended.exit_code == 4  # as on every full disk
    (error,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert f"spill: the disk failed while {verb}" in error
    assert "No space left on device" in error
    assert "Traceback" not in ended.output
    monkeypatch.setattr(file_tier, "_system_io", original)
    said = succeed("train", run_file, "checkpoint.every=1")
    assert "step 3/4" in said
    assert "step 2/4" not in said
    assert list((work / "spill").iterdir()) == []
    assert losses(work / "out") == losses(work / "plain")
