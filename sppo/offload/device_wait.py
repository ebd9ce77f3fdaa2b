"""Waits for a CUDA device that end if the device stops making progress.

After a failure on one of several ranks, compute may wait for a message of a rank that waits for
this one; waiting for the device without a timeout would then hide the failure.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

_ASK_EVERY_S = 0.001


def wait_with_timeout(
    cuda: Any,
    device: torch.device,
    streams: Sequence[Any],
    *,
    stall_timeout_s: float,
    marks: Sequence[Any] = (),
) -> bool:
    """Wait for the work issued to ``streams``; return False if the device stops making progress.

    A thread queries the device, because even recording an event may block if a stream waits for
    another rank and its queue is full.

    Args:
        cuda: CUDA runtime.
        device: Device of the streams.
        streams: Streams to wait for.
        stall_timeout_s: Longest time in seconds without progress, that is, without a mark being
            reached.
        marks: Events in the streams, in the order in which the device reaches them.

    Returns:
        Whether the device has done all work.

    Raises:
        RuntimeError: The device failed.
    """
    question = _Question(cuda, device, streams, marks)
    threading.Thread(target=question.ask, name="sppo device", daemon=True).start()
    while not question.answered.wait(
        max(0.0, question.moved_s + stall_timeout_s - time.monotonic())
    ):
        if time.monotonic() >= question.moved_s + stall_timeout_s:
            question.given_up = True
            return False
    if question.error is not None:
        raise question.error
    return True


class _Question:
    """Query, run in a thread, whether a device has done the work issued to some streams."""

    def __init__(
        self, cuda: Any, device: torch.device, streams: Sequence[Any], marks: Sequence[Any]
    ) -> None:
        self._cuda, self._device, self._streams = cuda, device, streams
        self._left = deque(marks)
        self.answered = threading.Event()
        self.error: Exception | None = None
        self.moved_s = time.monotonic()
        """Time at which the device was last seen to have reached a mark, by ``time.monotonic``."""
        self.given_up = False
        """True if the caller has stopped waiting for the answer."""

    def ask(self) -> None:
        try:
            self._cuda.set_device(self._device)  # a new thread starts on the first device
            for stream in self._streams:
                event = self._cuda.Event()
                event.record(stream)
                self._left.append(event)
            while self._left and not self.given_up:
                if self._left[0].query():
                    self._left.popleft()
                    self.moved_s = time.monotonic()
                else:
                    time.sleep(_ASK_EVERY_S)
        except Exception as error:
            self.error = error
        self.answered.set()
