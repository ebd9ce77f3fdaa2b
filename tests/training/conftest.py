"""Fixture that whole runs share: a process that forks the runs to kill."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.training.forked_sppo import ForkedSppo


@pytest.fixture(scope="session")
def sppo() -> Iterator[ForkedSppo]:
    """Runs the command in children that get signals at an exact moment."""
    command = ForkedSppo()
    yield command
    command.close()
