"""One thread: on tensors this small a second one only waits."""

from tests.engine.conftest import _one_thread  # noqa: F401
