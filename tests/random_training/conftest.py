"""Fixture that limits torch to one thread: with tensors this small a second thread only waits."""

from tests.engine.conftest import _one_thread  # noqa: F401
