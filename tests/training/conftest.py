"""Fixture that whole runs share: a process that forks the runs to kill."""

import pytest

from tests.training.forked_sppo import ForkedSppo


@pytest.fixture(scope="session")
def sppo():
    """Runs the command in children that get signals at an exact moment."""
    command = ForkedSppo()
    yield command
    command.close()
