"""Runs in the looped order: the same training as in other orders, with messages and counts."""

from __future__ import annotations

import errno
import json
import os

import pytest

from sppo.offload.disk import disk_room as disk
from sppo.offload.disk import file_tier
from sppo.offload.disk.disk_room import DiskRoom
from sppo.training import trainer
from tests.conftest import call, refuse, succeed, write_run
from tests.training.jobs import losses, summary

MODEL = {"preset": "tiny-test", "vocab_size": 32, "num_layers": 3}
BLOCKS_OF_A_STEP = 2 * 4
"""K and V of two of three layers, of four subsequences."""
WAYS = {
    "retained": (3, {"kv": "retain"}),
    "two stages": (2, {}),
    "recomputed": (3, {"kv": "recompute", "policy": "keep_attention"}),
    "to a disk": (3, {"kv": "offload", "disk": "spill", "policy": "offload_all"}),
    "to a disk, checked": (
        3,
        {"kv": "offload", "disk": "spill", "policy": "keep_attention", "debug": True},
    ),
}


@pytest.fixture(autouse=True)
def _quick(work, monkeypatch):
    (work / "spill").mkdir()


def looped_run(work, virtual, output="out", **activations):
    return write_run(
        work / f"{output}.yaml",
        model=MODEL,
        parallel={"virtual_stages": virtual},
        activations=activations,
        train={"output": output},
    )


@pytest.mark.parametrize("way", WAYS)
def test_training_is_that_of_one_stage(work, way):
    virtual, activations = WAYS[way]
    succeed("train", looped_run(work, 1, output="plain", policy="retain"))
    succeed("train", looped_run(work, virtual, **activations))
    assert losses(work / "out") == losses(work / "plain")
    plan = json.loads((work / "out" / "plan.json").read_text())
    assert plan["virtual_stages"] == virtual == len(plan["stages"])
    placed = {"offload": "offloaded", "recompute": "recomputed"}
    wanted = placed.get(activations.get("kv"), "retained")
    assert (plan["kv"], plan["kv_recomputed"]) == (wanted, 0)
    found, planned = summary(work / "out"), summary(work / "plain")
    assert found["program_digest"] != planned["program_digest"]
    kv = found["memory_bytes"]["K/V and gradients"]
    # Of two stages one has a layer more, and K and V of the other are gone when it has gradients.
    assert kv["measured"] == kv["predicted"] * (0.8 if way == "two stages" else 1)
    assert kv["measured"] < planned["memory_bytes"]["K/V and gradients"]["measured"]
    timeline = found["timeline"]
    assert 0 < timeline["with_measured_compute_s"] <= timeline["makespan_s"]["measured"] * 1.000001
    assert list((work / "spill").iterdir()) == []


ONLY_KV = {"kv": "offload", "disk": "spill", "policy": "keep_attention"}
EVERYTHING = {"kv": "offload", "disk": "spill", "policy": "offload_all"}


def test_a_disk_too_small_for_keys_is_refused(work, monkeypatch):
    monkeypatch.setattr(disk, "disk_room", lambda directory: DiskRoom(free_bytes=20_000))
    error = refuse("train", looped_run(work, 3, **ONLY_KV), code=4)
    assert "with K and V (32.0 KiB, activations.kv) to activations.disk=spill" in error
    assert "activations.kv=retain or recompute offloads no K and V" in error
    assert not (work / "out").exists()
    succeed("train", looped_run(work, 3, **{**ONLY_KV, "kv": "recompute"}))


def test_a_ratio_that_fits_beside_keys_is_named(work, monkeypatch):
    monkeypatch.setattr(disk, "disk_room", lambda directory: DiskRoom(free_bytes=150_000))
    error = refuse("train", looped_run(work, 3, **EVERYTHING), code=4)
    assert "with K and V (32.0 KiB, activations.kv) to activations.disk=spill" in error
    ratio = float(error.split("offload_ratio=")[1].split(" ")[0])
    assert ratio > 0
    said = succeed("train", looped_run(work, 3, kv="offload", disk="spill", offload_ratio=ratio))
    assert "; K and V of 2 of 3 stages" in said


@pytest.mark.parametrize(
    "verb",
    ["writing", "reading"],
)
@pytest.mark.exhaustive
def test_a_disk_that_fails_under_keys_ends_the_run_and_the_next_goes_on(work, monkeypatch, verb):
    """The first step that is lost is the one under way: the third, behind a checkpoint."""
    succeed("train", looped_run(work, 1, output="plain", policy="keep_attention"))
    run_file, calls = looped_run(work, 3, **ONLY_KV), 0
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["activations.kv=offload"], "no tier to offload K and V to"),
        (
            ["activations.kv=recompute", "activations.input_every=2"],
            "write activations.input_every=1",
        ),
        (["parallel.virtual_stages=9"], "there are 3"),
        (
            ["parallel.virtual_stages=1", "activations.kv=recompute"],
            "uses K and V of all layers at once",
        ),
        (
            ["parallel.schedule=interleaved_seq1f1b", "activations.kv=recompute"],
            "uses K and V of several stages at once",
        ),
    ],
)
def test_what_cannot_be_is_refused(work, words, message):
    said = refuse("train", looped_run(work, 3), *words)
    assert message in " ".join(said.split())
    assert not (work / "out").exists()
