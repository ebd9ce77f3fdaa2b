"""Timeouts of ranks that wait for devices."""

import pytest

from sppo.config.base import LONGEST_TIMEOUT_S
from sppo.parallel.job.timeouts import issued_timeout, stall_timeout


@pytest.mark.parametrize(
    ("timeout_s", "step_s", "stall_timeout_s"),
    [(600, 10, 600), (8, 100, 200), (600, 1e9, LONGEST_TIMEOUT_S)],
)
def test_a_device_is_waited_for_as_long_as_others_may_compute(timeout_s, step_s, stall_timeout_s):
    assert stall_timeout(timeout_s, predicted_step_s=step_s) == stall_timeout_s
    issued_s = issued_timeout(stall_timeout_s)
    assert issued_s >= min(stall_timeout_s + 2 * step_s, LONGEST_TIMEOUT_S) - 1e-9
