"""Plans of targets, and whether a plan reaches its target."""

import json

import pytest

from experiments import harness, long_sequences
from experiments.long_sequences import Target
from tests.tiers import exhaustive

RUN = "configs/run/gpt_7b_512k_32gpu.yaml"
ONE_DEVICE = (
    f"{RUN} model.preset=tiny-gpt sequence.length=4Ki hardware.nodes=1 hardware.devices_per_node=1"
)
RECOMPUTED = "activations.policy=recompute"


def test_a_target_beside_its_baseline():
    target = Target("small", ONE_DEVICE, most_s=60.0, baseline=RECOMPUTED, least_ratio=1.0)
    found = long_sequences.row(target)
    assert found["reached"]
    assert found["ratio"] == found["baseline"]["step_s"] / found["found"]["step_s"]
    assert found["command"].startswith(f"sppo solve {RUN} model.preset=tiny-gpt")
    json.dumps(found)


@pytest.mark.parametrize("limit", exhaustive({"most_s": 1e-9}, {"least_ratio": 1e9}))
def test_what_is_missed_is_not_called_reached(limit):
    baseline = RECOMPUTED if "least_ratio" in limit else ""
    assert not long_sequences.row(Target("small", ONE_DEVICE, baseline=baseline, **limit))[
        "reached"
    ]


@pytest.mark.exhaustive
def test_what_does_not_fit_says_why():
    request = f"{ONE_DEVICE} model.preset=gpt-65b hardware.host_memory=8GiB {RECOMPUTED}"
    found = long_sequences.row(Target("too long", request))
    assert not found["reached"]
    assert "needs" in found["found"]["reason"]
    assert found["found"]["advice"]


def test_run_files_of_targets_exist():
    for target in long_sequences.TARGETS:
        assert (harness.ROOT / target.request.split()[0]).is_file()
