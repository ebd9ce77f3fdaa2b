"""A fault in a run of two ranks: the run ends as it must, and goes on with the same losses.

A sample by default; ``pytest -m chaos tests/chaos/test_injections.py`` has all kinds at hundreds of
places, and other ones with ``--seed``.
"""

import pytest

from tests.chaos.faults import FAULTS
from tests.chaos.injections import Injector
from tests.chaos.isolation import can_isolate
from tests.training.forked_sppo import ForkedSppo

SAMPLE = (35, 361, 2, 103, 204)
"""One in each layout: a kill, a stop, a bug, and flipped bits in a block and in a weight."""
MANY = 300
"""Injections of ``-m chaos``, and the first of their seeds."""


@pytest.fixture(scope="module")
def injector(tmp_path_factory):
    disk = tmp_path_factory.mktemp("disk") if can_isolate() else None
    with ForkedSppo(disk=disk) as sppo:
        yield Injector(tmp_path_factory.mktemp("inputs"), sppo)


def of_chaos():
    return [pytest.param(seed, marks=pytest.mark.chaos) for seed in range(MANY, 2 * MANY)]


@pytest.mark.parametrize("seed", [*SAMPLE, *of_chaos()])
def test_a_run_with_a_fault_ends_as_it_must_and_goes_on(seed, injector, pytestconfig):
    injection = injector.draw(seed + MANY * pytestconfig.getoption("--seed"))
    if FAULTS[injection.kind].needs_isolation and not can_isolate():
        pytest.skip("this machine lets nobody make a disk or a network")
    assert not injector.verdict(injection).problem, injection
