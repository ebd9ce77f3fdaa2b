"""Runs with weights, gradients and optimizer states on a disk: the same training."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch

from sppo.checkpoint.checkpoint import read_weights
from sppo.offload.disk import mapped_file
from sppo.offload.disk.disk_room import DiskRoom
from sppo.training import preflight
from sppo.training.interruption import StopRequest
from tests.conftest import call, refuse, succeed, write_run
from tests.tiers import each_once
from tests.training.jobs import losses, summary

MODEL = {"preset": "tiny-test", "vocab_size": 32, "num_layers": 3}
ALL = {"weights": "disk", "gradients": "disk", "optimizer": "disk"}
WAYS = {
    "optimizer": {"optimizer": "disk"},
    "gradients": {"gradients": "disk"},
    "weights": {"weights": "disk"},
    "all": ALL,
}

LIVES = {
    "optimizer": ["optimizer"],
    "gradients": ["gradients", "optimizer"],
    "weights": ["weights", "optimizer"],
    "all": ["weights", "gradients", "optimizer"],
}
"""What then lives on the disk: the optimizer steps beside the others."""


@pytest.fixture(autouse=True)
def _quick(work, monkeypatch):
    (work / "spill").mkdir()


def run_of(work, output="out", *, state=None, train=None, parallel=None, model=None, **activations):
    return write_run(
        work / f"{output}.yaml",
        model={**MODEL, **(model or {})},
        parallel={"virtual_stages": 3, **(parallel or {})},
        activations={"disk": "spill", "policy": "keep_attention", "kv": "retain", **activations},
        state=state or {},
        optimizer={"schedule": "constant"},
        train={"output": output, **(train or {})},
    )


def model_of(work, output):
    """fp32 weights of the newest checkpoint of a run."""
    return read_weights(work / output)[1]


def assert_same_model(work, one, other):
    first, second = model_of(work, one), model_of(work, other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("way", "dtype"), each_once(WAYS, ["bf16", "fp32"]))
def test_training_is_that_on_the_device(work, way, dtype):
    train = {"dtype": dtype, "steps": 3}
    succeed("train", run_of(work, "plain", train=train))
    text = succeed("train", run_of(work, state=WAYS[way], train=train))
    assert f"state     {', '.join(LIVES[way])} on disk (spill): " in text
    assert losses(work / "out") == losses(work / "plain")
    assert_same_model(work, "out", "plain")
    assert not os.listdir(work / "spill")
    plan = json.loads((work / "out" / "plan.json").read_text())
    assert {part for part, tier in plan["state"].items() if tier == "disk"} == {*LIVES[way]}
    buckets = summary(work / "out")["memory_bytes"]
    for bucket in ("weights", "gradients", "optimizer"):
        measured = buckets[bucket]["measured"]
        # Parameters without weight decay are in buckets of their own.
        assert measured == pytest.approx(buckets[bucket]["predicted"], rel=0.01), bucket


def test_a_run_goes_on_with_its_state_elsewhere(work):
    """Half on a disk, half on the device, in either order: as one run."""
    succeed("train", run_of(work, "plain", train={"steps": 4}))
    for number, tiers in enumerate([(ALL, {}), ({}, ALL)]):
        output = f"out{number}"
        for steps, state in zip((2, 4), tiers, strict=True):
            succeed("train", run_of(work, output, state=state, train={"steps": steps}))
        assert losses(work / output) == losses(work / "plain")
        assert_same_model(work, output, "plain")


def test_a_disk_without_room_is_refused_before_the_start(work, monkeypatch):
    def full(descriptor, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mapped_file.os, "posix_fallocate", full)
    text = refuse("train", run_of(work, state=ALL), code=4)
    assert "activations.disk=spill: no room for" in text
    assert "state.weights" in text
    assert not os.listdir(work / "spill")
    monkeypatch.undo()
    monkeypatch.chdir(work)
    monkeypatch.setattr(preflight, "usable_directory", lambda directory: DiskRoom(free_bytes=1000))
    text = refuse("train", run_of(work, "other", state=ALL), code=4)
    assert "the section state moves" in text
    assert "activations.disk=spill" in text
    assert not (work / "other").exists()


@pytest.mark.exhaustive
def test_an_interrupted_step_loses_nothing(work, monkeypatch):
    """A signal in the middle of a step: what was done is saved, and the run goes on from there."""
    succeed("train", run_of(work, "plain", train={"steps": 3}))
    original, seen = StopRequest.check, []

    def check(request):
        seen.append(request)
        if len(seen) == 60:
            request.signal_name = "SIGTERM"
        original(request)

    monkeypatch.setattr(StopRequest, "check", check)
    run = run_of(work, state=ALL, train={"steps": 3})
    call("train", run)
    monkeypatch.undo()
    monkeypatch.chdir(work)
    succeed("train", run)
    assert losses(work / "out") == losses(work / "plain")
    assert_same_model(work, "out", "plain")


def test_what_a_run_file_says_of_tiers_is_checked(work):
    cases = [
        ({"weights": "disk", "optimizer": "device"}, {}, "state.optimizer=disk"),
        ({"weights": "disk", "gradients": "host"}, {}, "one tier"),
        ({"weights": "disk"}, {"virtual_stages": 1}, "stage by stage"),
        ({"gradients": "disk"}, {"multiplexed": "on", "virtual_stages": "auto"}, "share units"),
    ]
    for state, parallel, rule in cases:
        text = refuse("train", run_of(work, state=state, parallel=parallel))
        assert rule in " ".join(text.split()), (state, text)
    text = refuse("train", run_of(work, state={"optimizer": "disk"}, disk=None))
    assert "activations.disk=DIR" in text
