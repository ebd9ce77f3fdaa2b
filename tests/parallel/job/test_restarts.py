"""Decision after a fault: alone, without a job."""

from dataclasses import replace

import pytest

from sppo.parallel.job.exit_codes import BAD_INPUT, CORRUPTED, FAULT, NO_PLAN, NO_ROOM
from sppo.parallel.job.restarts import Fault, decide


def fault(step=None, *, devices=(0,), code=FAULT, ranks=4, asked=None):
    return Fault(
        time="",
        attempt=1,
        num_ranks=ranks,
        rank=0,
        devices=devices,
        step=step,
        exit_code=code,
        asked=asked,
        cause="",
        report="",
        seconds={},
    )


def actions(*faults, restarts=9, shrink=False):
    """The action after each of the faults."""
    return [
        decide(faults[: count + 1], restarts=restarts, shrink=shrink).action
        for count in range(len(faults))
    ]


@pytest.mark.parametrize("shrink", [False, True])
def test_faults_at_other_steps_restart_as_often_as_allowed(shrink):
    faults = [fault(3), fault(), fault(3), fault(8)]
    assert actions(*faults, restarts=3, shrink=shrink) == [*["restart"] * 3, "end"]
    assert actions(fault(3), restarts=0, shrink=shrink) == ["end"]


@pytest.mark.parametrize("code", [BAD_INPUT, NO_PLAN, NO_ROOM])
def test_what_would_repeat_or_was_asked_for_ends(code):
    assert actions(fault(3, code=code), shrink=True) == ["end"]
    assert actions(fault(3, asked="SIGTERM"), shrink=True) == ["end"]


@pytest.mark.parametrize("step", [None, 5])
def test_a_repeated_fault_ends_unless_its_device_can_be_left_out(step):
    same, other = [fault(step, devices=(2,))] * 2, [fault(step), fault(step, devices=(1,))]
    assert actions(*same) == actions(*other, shrink=True) == ["restart", "end"]
    assert actions(*same, shrink=True) == ["restart", "leave out"]
    assert actions(*[fault(step, ranks=1)] * 2, shrink=True) == ["restart", "end"]
    assert f"{'before the first step' if step is None else 'at step 5'}" in (
        decide(same, restarts=9, shrink=False).reason
    )


def test_a_corrupting_device_is_left_out_at_once_or_ends_the_run():
    corrupt = fault(7, devices=(3,), code=CORRUPTED)
    assert actions(corrupt) == ["end"]
    assert actions(corrupt, shrink=True) == ["leave out"]
    assert actions(corrupt, restarts=0, shrink=True) == ["end"]
    suspects = fault(7, devices=(0, 3), code=CORRUPTED)
    assert decide([suspects], restarts=1, shrink=True).reason.endswith("without devices 0, 3")
    assert actions(replace(suspects, num_ranks=2), shrink=True) == ["end"]
