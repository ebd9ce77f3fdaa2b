"""scripts/plan_long_sequences.py: plans of targets, and whether a plan reaches its target."""

import importlib
import json
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
RUN = "configs/run/gpt_7b_512k_32gpu.yaml"
SMALL = ("model.preset=tiny-gpt", "sequence.length=4Ki", "hardware.nodes=1")
ONE_DEVICE = (*SMALL, "hardware.devices_per_node=1")
LITTLE_HOST = "hardware.host_memory=8GiB"
ONE_WAY = "activations.policy=recompute"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("plan_long_sequences")


def test_a_target_beside_its_baseline(script):
    target = script.Target(
        "a small model",
        RUN,
        ONE_DEVICE,
        most_s=60.0,
        baseline=("activations.policy=recompute",),
        least_ratio=1.0,
    )
    found = script.row(target)
    assert found["reached"]
    assert found["ratio"] == found["baseline"]["step_s"] / found["found"]["step_s"]
    assert found["baseline_command"] == f"{found['command']} activations.policy=recompute"
    json.dumps(found)


@pytest.mark.parametrize("limit", [{"most_s": 1e-9}, {"least_ratio": 1e9}])
def test_what_is_missed_is_not_called_reached(script, limit):
    baseline = ("activations.policy=recompute",) if "least_ratio" in limit else ()
    target = script.Target("a small model", RUN, ONE_DEVICE, baseline=baseline, **limit)
    assert not script.row(target)["reached"]


def test_what_does_not_fit_says_why(script):
    found = script.row(
        script.Target("too long", RUN, (*ONE_DEVICE, "model.preset=gpt-65b", LITTLE_HOST, ONE_WAY))
    )
    assert not found["reached"]
    assert "needs" in found["found"]["reason"]
    assert found["found"]["advice"]


def test_a_refused_request_is_an_error(script):
    with pytest.raises(RuntimeError, match="sequence.length"):
        script.row(script.Target("no request", RUN, ("sequence.length=0",)))


def test_every_command_can_be_typed(script):
    for target in script.TARGETS:
        words = [target.run_file, *target.overrides]
        assert script.command(words).startswith("sppo solve configs/run/")
        assert (SCRIPTS.parent / target.run_file).is_file()
