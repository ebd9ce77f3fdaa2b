"""Stops of a job, the interval between its checkpoints, and the shares of its time."""

import math

import pytest

from sppo.config.run import HardwareConfig
from sppo.hardware.faults import mean_time_between_stops_s, saving_interval_s, time_shares

HOUR_S = 3600


def test_the_published_rate_is_that_of_its_cluster_and_a_written_one_replaces_it():
    published_s = mean_time_between_stops_s("auto", num_devices=16384)
    assert 54 * 24 * HOUR_S / published_s == pytest.approx(419 + 54)
    one = HardwareConfig(mean_time_to_failure="8000h")
    assert mean_time_between_stops_s(one, num_devices=8) == pytest.approx(1000 * HOUR_S)
    of_one_device_s = mean_time_between_stops_s(HardwareConfig(), num_devices=1)
    assert 23.9 * HOUR_S < of_one_device_s < 24 * HOUR_S


def test_the_first_save_does_not_wait_for_a_measured_one():
    assert saving_interval_s(None, between_stops_s=1e9) == 600


@pytest.mark.parametrize("save_s", [0.1, 10, 600, 3600])
@pytest.mark.parametrize("between_stops_s", [HOUR_S, 24 * HOUR_S])
def test_no_other_interval_leaves_more_training_time(save_s, between_stops_s):
    def effective(interval_s):
        times = {"save_s": save_s, "restart_s": 300, "between_stops_s": between_stops_s}
        return time_shares(interval_s, **times).effective

    chosen_s = saving_interval_s(save_s, between_stops_s=between_stops_s)
    best = max(effective(chosen_s * 1.01**power) for power in range(-300, 300))
    assert effective(chosen_s) > best - 1e-4


def test_the_interval_of_saves_that_hardly_ever_succeed_is_the_time_between_stops():
    assert saving_interval_s(2 * HOUR_S, between_stops_s=HOUR_S) == HOUR_S


@pytest.mark.parametrize(("save_s", "restart_s"), [(0, 0), (60, 0), (0, 900), (60, 900)])
def test_shares_add_up_and_each_has_its_cause(save_s, restart_s):
    times = {"save_s": save_s, "restart_s": restart_s, "between_stops_s": 10 * HOUR_S}
    shares = time_shares(HOUR_S, **times)
    found = (shares.effective, shares.saving, shares.lost, shares.restarting)
    assert math.fsum(found) == pytest.approx(1)
    assert shares.saving == pytest.approx(shares.effective * save_s / HOUR_S)
    assert shares.restarting == pytest.approx(restart_s / (10 * HOUR_S), rel=0.02)
    # A stop loses half of an interval on average, if stops are rare.
    lost_s = (HOUR_S + save_s) / 2
    assert shares.lost == pytest.approx(lost_s / (10 * HOUR_S) * (1 - shares.restarting), rel=0.05)


def test_a_job_that_never_reaches_a_save_has_no_effective_time():
    shares = time_shares(1e6, save_s=1, restart_s=900, between_stops_s=900)
    assert shares.effective == shares.saving == 0
    assert shares.restarting + shares.lost == pytest.approx(1)
