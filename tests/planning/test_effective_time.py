"""Effective training time of a run with each way to say when it is saved."""

from dataclasses import replace

import pytest

from sppo.hardware.presets import PRESETS
from sppo.planning.effective_time import STORAGE_BYTES_PER_S, effective_time
from tests.planning.cases import run_config

H100 = replace(PRESETS["h100"], num_nodes=4)


def of(checkpoint, *, step_s=50.0, **sections):
    run = run_config("llama-3.2-1b", checkpoint=checkpoint, **sections)
    return effective_time(run, hardware=H100, num_devices=16, step_s=step_s, restart_s=60.0)


def test_nodes_write_their_parts_of_a_checkpoint_at_once():
    parameters = 1_235_814_400
    assert of({}).save_s == pytest.approx(12 * parameters / (2 * STORAGE_BYTES_PER_S))


@pytest.mark.parametrize(("every", "steps"), [(7, 7), (0, 300)])
def test_intervals_by_steps(every, steps):
    assert of({"every": every}, train={"steps": 300}).interval_s == steps * 50


def test_the_automatic_interval_ends_after_a_step():
    found = of({})
    assert found.interval_s % 50 == 0
    longer = of({}, hardware={"mean_time_to_failure": "100000d"})
    assert longer.interval_s > 3 * found.interval_s
    assert longer.shares.effective > found.shares.effective > of({"every": 1}).shares.effective


def test_without_the_number_of_steps_the_only_interval_is_not_known():
    assert of({"every": 0}, train={"epochs": 2}) is None
