"""Runs that offload saved activations to a disk: the same training; messages; bad disks."""

from __future__ import annotations

import errno
import os
import resource

import pytest

from sppo.config import load_run
from sppo.kernels.native.machine_memory import MemoryRoom
from sppo.offload.disk import disk_room as disk
from sppo.offload.disk.disk_room import DiskRoom
from sppo.offload.disk.file_tier import FileTier
from sppo.planning.run_plan import USABLE_FRACTION
from sppo.training import preflight as preflight_module
from sppo.training.preflight import preflight
from tests.conftest import refuse, succeed, write_run
from tests.tiers import default_of, exhaustive
from tests.training.jobs import job_alone, losses, records, summary, train_alone

OFFLOADING = {
    "offload_all": {"policy": "offload_all"},
    "sppo": {"policy": "sppo"},
    "a ratio": {"offload_ratio": 0.6},
    "everything by ratio": {"offload_ratio": 1.0, "tier": "disk"},
    "debug": {"policy": "offload_all", "debug": True},
    "input_every": {"policy": "offload_all", "input_every": 2},
}
MODEL = {"preset": "tiny-test", "vocab_size": 32, "num_layers": 3}


@pytest.fixture(autouse=True)
def _quick(work, monkeypatch):
    (work / "spill").mkdir()


def offloading_run(work, output="out", *, sequence=None, **activations):
    sections = {"activations": {"disk": "spill", **activations}, "train": {"output": output}}
    if sequence is not None:
        sections |= {"sequence": sequence}
    return write_run(work / "run.yaml", model=MODEL, **sections)


@pytest.mark.parametrize("name", default_of(OFFLOADING, "a ratio"))
def test_training_is_that_of_keeping_everything(work, name):
    activations = OFFLOADING[name]
    every = {"input_every": activations.get("input_every", 1)}
    succeed("train", offloading_run(work, output="kept", policy="retain", **every))
    said = succeed("train", offloading_run(work, **activations))
    assert losses(work / "out") == losses(work / "kept")
    assert "to spill and back: " in said
    assert "waiting for copies time" in said
    for record in records(work / "out"):
        assert record["offloaded_bytes"] > 0
        assert record["exposed_copy_s"] >= 0
        assert record["disk_peak_bytes"] > record["host_peak_bytes"] == 0
    assert {record["offloaded_bytes"] for record in records(work / "kept")} == {0}
    assert list((work / "spill").iterdir()) == []


def test_a_plan_that_moves_is_followed(work):
    """Made by the solver for a machine with too little memory to keep everything."""
    run_file = offloading_run(work, offload_ratio=0.5)
    succeed("solve", run_file, "-o", "plan.json")
    succeed("train", run_file, "--plan", "plan.json")
    succeed("train", offloading_run(work, output="kept", policy="retain"))
    assert losses(work / "out") == losses(work / "kept")
    assert records(work / "out")[0]["offloaded_bytes"] > 0


def test_a_plan_for_a_gpu_is_not_followed_on_the_cpu(work):
    run_file = offloading_run(work, offload_ratio=0.5)
    gpu = ("hardware.preset=h100", "hardware.devices_per_node=1")
    succeed("solve", run_file, *gpu, "-o", "plan.json")
    error = refuse("train", run_file, *gpu, "--plan", "plan.json")
    assert "plan.json was made for h100" in error
    assert "solve again with hardware.preset=laptop-cpu" in error
    assert not (work / "out").exists()


def test_a_file_system_in_memory_counts_as_memory(work, monkeypatch):
    run_file = offloading_run(work, policy="offload_all")
    needed = preflight(job_alone(load_run(run_file))).plan.stages[0].memory
    monkeypatch.setattr(preflight_module, "is_memory", lambda directory: True)
    preflight(job_alone(load_run(run_file)))
    room = needed.device.total_bytes + needed.tier_activations_bytes
    monkeypatch.setattr(
        "sppo.training.devices.cpu_device.memory_room", lambda: MemoryRoom(room - 1)
    )
    error = refuse("train", run_file, code=4)
    assert "activations.disk=spill is a file system in memory" in error


def test_a_limit_on_files_is_found_before_the_first_step(work, monkeypatch):
    whole = resource.getrlimit
    limits = {resource.RLIMIT_FSIZE: (100_000, 100_000)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits.get(which) or whole(which))
    error = refuse("train", offloading_run(work, policy="offload_all"), code=4)
    assert "may write files of 97.7 KiB at most" in error
    assert not (work / "out").exists()


def test_buckets_and_copies_are_those_predicted(work):
    run = load_run(offloading_run(work, policy="offload_all"))
    plan = preflight(job_alone(run)).plan
    outcome = train_alone(run, reports=True)
    device = plan.stages[0].memory.device
    assert outcome.buckets.copies_bytes == device.copies_bytes > 0
    saved = device.activations_bytes + device.loss_gradient_bytes
    assert outcome.buckets.activations_bytes == saved
    told = summary(work / "out")
    copies = told["copies"]
    assert copies["disk_bytes"]["measured"] == copies["disk_bytes"]["predicted"] > 0
    assert copies["host_bytes"] == {"measured": 0, "predicted": 0}
    assert copies["out_bytes"].keys() == {"x_in", "attention", "linear"}
    assert copies["out_bytes"] == copies["back_bytes"]
    pair = told["memory_bytes"]["copies"]
    assert pair["measured"] == pair["predicted"]


def test_what_fits_is_not_moved(work):
    succeed("train", offloading_run(work))
    assert {record["offloaded_bytes"] for record in records(work / "out")} == {0}


@pytest.mark.parametrize(
    ("activations", "says"),
    [
        ({"disk": "nowhere"}, "activations.disk=nowhere: no such directory; make it"),
        ({"disk": "run.yaml"}, "activations.disk=run.yaml: not a directory"),
        ({"disk": None, "policy": "sppo"}, "name a disk directory (activations.disk)"),
        ({"disk": None, "offload_ratio": 0.5}, "name a disk directory (activations.disk)"),
        ({"disk": None, "tier": "disk"}, "activations.tier=disk without a directory"),
        ({"tier": "host"}, "activations.tier"),
    ],
)
def test_what_cannot_be_moved_to_is_refused(work, activations, says):
    assert says in refuse("train", offloading_run(work, **activations))
    assert not (work / "out").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_refused(work):
    (work / "spill").chmod(0o500)
    error = refuse("train", offloading_run(work, policy="offload_all"))
    assert "no file can be made there (Permission denied)" in error


def test_a_disk_that_is_too_small_is_refused(work, monkeypatch):
    monkeypatch.setattr(disk, "disk_room", lambda directory: DiskRoom(free_bytes=100_000))
    error = refuse("train", offloading_run(work, policy="offload_all"), code=4)
    assert "activations.policy=offload_all offloads" in error
    assert "activations.offload_ratio=0." in error
    ratio = float(error.split("offload_ratio=")[1].split(" ")[0])
    succeed("train", offloading_run(work, offload_ratio=ratio))


@pytest.mark.parametrize(
    "activations",
    [{"policy": "offload_all"}, *exhaustive({"offload_ratio": 0.5}, {"tier": "disk"})],
)
def test_a_full_disk_is_not_called_missing(work, monkeypatch, activations):
    monkeypatch.setattr(disk, "disk_room", lambda directory: DiskRoom(free_bytes=0))
    error = refuse("train", offloading_run(work, **activations), code=4)
    assert "activations.disk=spill: the disk is full; free space" in error
    succeed("train", offloading_run(work))


def test_a_disk_that_fails_ends_the_run_and_the_next_goes_on(work, monkeypatch):
    original = FileTier.write

    def failing(self, offset_bytes, array):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(FileTier, "write", failing)
    error = refuse("train", offloading_run(work, policy="offload_all"), code=1)
    assert "spill: the disk failed while writing" in error
    monkeypatch.setattr(FileTier, "write", original)
    succeed("train", offloading_run(work, policy="offload_all"))
    succeed("train", offloading_run(work, output="kept", policy="retain"))
    assert losses(work / "out") == losses(work / "kept")


def test_hybrid_moves_what_does_not_fit(work, monkeypatch):
    """Memory for two thirds of what is saved: some is offloaded, nothing recomputed."""
    long = {"length": 512, "num_subsequences": 16}
    keeping = offloading_run(work, sequence=long, policy="retain")
    device = preflight(job_alone(load_run(keeping))).plan.stages[0].memory.device
    succeed("train", offloading_run(work, output="kept", sequence=long, policy="retain"))
    usable = device.total_bytes - device.activations_bytes // 3
    room = MemoryRoom(int(usable / USABLE_FRACTION) + 1)
    monkeypatch.setattr("sppo.training.devices.cpu_device.memory_room", lambda: room)
    monkeypatch.setattr(preflight_module, "REPORT_BYTES", 0)  # plots would need more than this run
    run_file = offloading_run(work, sequence=long)
    plan = preflight(job_alone(load_run(run_file))).plan
    assert plan.policy == "hybrid"
    assert plan.predicted.device_peak_bytes <= usable
    assert not any(any(part.recomputed) for part in plan.stages[0].subsequences)
    succeed("train", run_file)
    assert losses(work / "out") == losses(work / "kept")
    assert 0 < records(work / "out")[0]["offloaded_bytes"] < device.activations_bytes
