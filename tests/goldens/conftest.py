"""Fixture that limits torch to one thread: sums are then in one order, whatever the machine."""

from tests.engine.conftest import _one_thread  # noqa: F401
